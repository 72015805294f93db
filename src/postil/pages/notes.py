r"""Notes: what the author typed, made ready for Markdown.

A comment loses its `#`, a docstring its quotes and its indentation, and both keep the numbers of their
lines, so that a fault in a formula can be reported where it stands. A docstring's **sections** (`Raises:`,
`Source:`) and its **fields** at the end of a module's docstring are told apart from prose here:

    :title: AFT-local
    :description: Attention without attention, inside a window.
    :paper: zhai2021
    :terms:
        K: key, exp_key
        w: pos_bias

A term links a symbol of the page's formulas to names in its code.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field

from postil.pages.source import Row, Source

__all__ = ["FrontMatter", "Item", "Note", "Section", "front_matter", "note_of", "sections"]


@dataclass(frozen=True)
class Note:
    r"""Markdown, and the line of the source at which it begins."""

    text: str
    line: int


@dataclass(frozen=True)
class Item:
    r"""One entry of a section: an error's name and when it is raised. `term` may be empty."""

    term: str
    note: Note


@dataclass(frozen=True)
class Section:
    r"""A labelled part of a docstring; plain prose has no label and one item."""

    label: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class FrontMatter:
    r"""What a module's docstring says about its page."""

    title: str = ""
    description: str = ""
    papers: tuple[str, ...] = ()
    terms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fields: dict[str, str] = field(default_factory=dict)


def note_of(source: Source, row: Row) -> list[Note]:
    r"""The notes of a row, in order: comment blocks and docstrings."""
    notes = []
    for part in row.parts:
        if part.kind == "comment":
            lines = [str(line.strip().lstrip("#")) for line in source.lines[part.first - 1 : part.last]]
            notes.append(Note(_dedent(lines), part.first))
        elif part.kind == "docstring":
            notes.append(Note(docstring_text(source, part.first, part.last), part.first))
    return [note for note in notes if note.text.strip()]


# The text between the quotes, letter for letter. Evaluating it would turn `\theta` into a tab and "heta" in a
# docstring that forgot its `r`. Adjacent literals are joined, as Python joins them.
def docstring_text(source: Source, first: int, last: int) -> str:
    r"""A docstring as typed, without quotes and indentation."""
    pieces = []
    reader = io.StringIO(source.text(first, last) + "\n", newline="\n").readline
    try:
        for token in tokenize.generate_tokens(reader):
            if token.type == tokenize.STRING:
                match = re.match(r"([A-Za-z]*)(\"\"\"|'''|\"|')", token.string)
                if match:
                    quote = len(match[2])
                    body = token.string[match.end() : len(token.string) - quote]
                    pieces.append(body if "r" in match[1].lower() else _typed(body))
    except (tokenize.TokenError, IndentationError):
        # The lines alone, cut out of their indentation, may not be a whole program; their strings are read.
        pass
    head, _, rest = "".join(pieces).partition("\n")
    text = head.strip() + ("\n" + _dedent(rest.split("\n")) if rest else "")
    return text.rstrip()


# Without the `r`, an author who knows the rule has doubled the backslash of a command; a backslash before a
# quote or a line end is Python's. Everything else stays as it was typed.
def _typed(body: str) -> str:
    def typed(escape: re.Match[str]) -> str:
        if escape[1] == "\\":
            return "\\" if body[escape.end() : escape.end() + 1].isalpha() else "\\\\"
        return escape[1].strip("\n")

    return re.sub(r"\\([\\\"'\n])", typed, body)


def wants_raw_prefix(source: Source, first: int) -> bool:
    r"""True for a docstring whose backslashes Python evaluates."""
    match = re.match(r"\s*([A-Za-z]*)[\"']", source.lines[first - 1])
    return bool(match) and "r" not in match[1].lower()


def _dedent(lines: Sequence[str]) -> str:
    margins = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    margin = min(margins, default=0)
    return "\n".join(line[margin:].rstrip() if line.strip() else "" for line in lines)


_LISTS = (
    "Args|Arguments|Parameters|Attributes|Keyword Args|Other Parameters|Raises|Returns|Yields|Warns|See Also"
)
_PROSE = "Source|Deviation|Cost|Shape|Shapes|Units|Example|Examples|Note|Notes|Warning|References|Todo|Tip"
_LABEL = re.compile(rf"({_LISTS}|{_PROSE}):(?:[ \t]+(\S.*))?$")
_ITEM = re.compile(r"(\*{0,2}`?[\w.]+`?(?:, ?\*{0,2}[\w.]+)*(?: ?\([^()]*\))?):(?:[ \t]+(.*))?$")


def sections(note: Note) -> list[Section]:
    r"""Tell labelled sections from prose.

    A label stands at the left margin; what belongs to it follows on the same line, or indented below.
    """
    lines = note.text.split("\n")
    found: list[Section] = []
    prose_from, i, fenced = 0, 0, False

    def prose(end: int) -> None:
        text = "\n".join(lines[prose_from:end])
        if text.strip():
            found.append(Section("", (Item("", Note(text, note.line + prose_from)),)))

    while i < len(lines):
        fenced ^= lines[i].startswith(("```", "~~~", "$$")) and not re.match(r"\$\$.+\$\$", lines[i])
        match = None if fenced else _LABEL.match(lines[i])
        # "Note: this and that" inside a paragraph is prose; a label opens a block.
        opens = match and (i == 0 or not lines[i - 1].strip() or i == prose_from)
        end = _section_end(lines, i)
        if not match or not opens or (match[2] is None and end == i + 1):
            i += 1
            continue
        prose(i)
        found += _labelled(match[1], match[2] or "", lines, i, end, note.line)
        i = prose_from = end
    prose(len(lines))
    return found


# "Source: [key], Eq. 1. Deviation: none." is two labels on one line, as one writes them in a short docstring.
_INLINE = re.compile(r"(?<=[.;]) (Source|Deviation|Cost|Shape|Units): ")


def _labelled(label: str, text: str, lines: list[str], start: int, end: int, line: int) -> list[Section]:
    items = _items(label, text, lines, start, end, line)
    if re.fullmatch(_LISTS, label) or len(items) != 1:
        return [Section(label, tuple(items))]
    first, *rest = _INLINE.split(" ".join(items[0].note.text.split("\n")) if text else items[0].note.text)
    found = [Section(label, (Item("", Note(first, items[0].note.line)),))]
    for name, words in zip(rest[::2], rest[1::2], strict=True):
        found.append(Section(name, (Item("", Note(words, items[0].note.line)),)))
    return found


def _section_end(lines: list[str], start: int) -> int:
    end = start + 1
    if _LABEL.match(lines[start]) and (_LABEL.match(lines[start]) or [None] * 3)[2] is not None:
        # A label with text on its own line runs to the next blank line or label.
        while end < len(lines) and lines[end].strip() and not _LABEL.match(lines[end]):
            end += 1
        return end
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith((" ", "\t"))):
        end += 1
    while end > start + 1 and not lines[end - 1].strip():
        end -= 1
    return end


def _items(label: str, first: str, lines: list[str], start: int, end: int, line: int) -> list[Item]:
    body = _dedent(lines[start + 1 : end]).split("\n") if end > start + 1 else []
    if first or not re.fullmatch(_LISTS, label):
        text = "\n".join(([first] if first else []) + body)
        return [Item("", Note(text, line + start + (0 if first else 1)))]
    items: list[tuple[str, list[str], int]] = []
    for offset, text in enumerate(body):
        match = _ITEM.match(text)
        if match and not text.startswith(" "):
            items.append((match[1], [match[2] or ""], offset))
        elif items:
            items[-1][1].append(text.strip())
        elif text.strip():
            items.append(("", [text], offset))
    return [Item(term, Note("\n".join(text).strip(), line + start + 1 + at)) for term, text, at in items]


_FIELD = re.compile(r":([a-z][a-z-]*):(?:[ \t]+(.*))?$")


# The first line is the summary that every Python author writes anyway: "Masks: who may read whom." gives the
# title and the description, "Read a file." the title alone. Fields come last and win.
def front_matter(note: Note | None) -> tuple[FrontMatter, Note | None]:
    r"""Read what a module's docstring says about its page; also return the docstring without that."""
    if note is None:
        return FrontMatter(), None
    lines = note.text.split("\n")
    fields, cut = _fields(lines)
    body = lines[:cut]
    head = body[0].strip() if body else ""
    summary = head if len(body) < 2 or not body[1].strip() else ""
    title, _, description = summary.rstrip(".").partition(": ")
    rest = Note("\n".join(body[1:]), note.line + 1) if summary else Note("\n".join(body), note.line)
    papers = tuple(key.strip() for key in fields.get("paper", "").split(",") if key.strip())
    terms = []
    for line in fields.pop("terms", "").split("\n"):
        symbol, colon, names = line.strip().partition(": ")
        if colon:
            terms.append((symbol.strip("$ "), tuple(n.strip(" `") for n in names.split(",") if n.strip())))
    fields.setdefault("title", title)
    fields.setdefault("description", description)
    front = FrontMatter(fields["title"], fields["description"], papers, tuple(terms), fields)
    return front, rest if rest.text.strip() else None


def _fields(lines: list[str]) -> tuple[dict[str, str], int]:
    cut = len(lines)
    while cut and (_FIELD.match(lines[cut - 1]) or lines[cut - 1].startswith("    ")):
        cut -= 1
    while cut < len(lines) and not _FIELD.match(lines[cut]):
        cut += 1
    fields: dict[str, str] = {}
    name = ""
    for line in lines[cut:]:
        match = _FIELD.match(line)
        if match:
            name = match[1]
            fields[name] = match[2] or ""
        elif name:
            fields[name] += "\n" + line.strip()
    return fields, cut

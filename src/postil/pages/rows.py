r"""Rows: notes beside their code.

Line numbers and shapes are drawn from attributes, so no selection ever holds one. A docstring's own lines
are folded in the code column: its words stand in the notes, its text is one click away, and the code that is
copied from a page is still the whole program.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from postil.pages import prose
from postil.pages.notes import Section
from postil.pages.prose import Context
from postil.pages.reading import Annotated, Page

__all__ = ["Entry", "Writer", "titles"]


@dataclass(frozen=True)
class Entry:
    r"""A line of "On this page"."""

    level: int
    anchor: str
    text: str
    is_code: bool


def titles(body: str, level: int) -> list[Entry]:
    r"""The section titles of a written piece of a page, as entries of that level."""
    found = re.findall(rf'<h{level} id="([^"]*)"[^>]*>(.*?)</h{level}>', body, flags=re.S)
    return [
        Entry(level, html.unescape(anchor), html.unescape(re.sub(r"<[^>]+>", "", text)), False)
        for anchor, text in found
    ]


@dataclass
class Writer:
    r"""Writes the rows of one page; `code` holds its lines as HTML, `shapes` what a run found beside them.

    `titled` are the scopes in which a section title has been seen.
    """

    page: Page
    context: Context
    words: dict[str, str]
    code: list[str]
    shapes: dict[int, str]
    lost: dict[str, str]
    titled: set[str] = field(default_factory=set)

    def section(self, section: Section) -> str:
        r"""A piece of prose, or a labelled part of a docstring as a list."""
        if not section.label:
            return prose.render(section.items[0].note, self.context)
        entries = []
        for item in section.items:
            body = prose.render(item.note, self.context)
            alone = re.fullmatch(r"<p>(.*)</p>", body, flags=re.S)
            body = alone[1] if alone and "<p>" not in alone[1] else body
            term = f'<code translate="no">{html.escape(item.term.strip("`"))}</code> ' if item.term else ""
            entries.append(f"<dd>{term}{body}</dd>")
        label = html.escape(self.words.get(section.label, section.label))
        return f'<dl class="section"><dt>{label}</dt>{"".join(entries)}</dl>'

    def rows(self, legend: str, contents: list[Entry]) -> str:
        r"""All rows; the legend of symbols stands in the first empty place beside code."""
        written = []
        for annotated in self.page.rows:
            place = legend if not annotated.anchor and not self._is_intro(annotated) else ""
            legend = "" if place else legend
            written.append(self._row(annotated, place, contents))
        return legend + "".join(written)

    def _is_intro(self, annotated: Annotated) -> bool:
        source = self.page.source
        return source is not None and source.docstring is not None and annotated.row.first == 1

    def _row(self, annotated: Annotated, legend: str, contents: list[Entry]) -> str:
        row, anchor = annotated.row, html.escape(annotated.anchor)
        moved = [old for old, new in self.lost.items() if anchor and new == annotated.anchor]
        aliases = "".join(f'<a id="{html.escape(old)}"></a>' for old in moved)
        title, sections = self._title(annotated, contents)
        head = self._head(annotated, contents)
        notes = "".join(self.section(section) for section in sections)
        code = "".join(self._code(annotated))
        kind = "row begin" if self._is_intro(annotated) else "row" if code else "row prose"
        identity = f' id="{anchor}"' if anchor else ""
        return (
            f'<div class="{kind}"{identity} data-lines="{row.first}-{row.last}">'
            f'<div class="note">{aliases}{title}{head}{notes}{legend}</div>'
            f'<div class="code" lang="en" translate="no">{code}</div></div>\n'
        )

    # A comment that begins with a title opens a section of the page. It stands above the name of what is
    # defined below it, and this and all that follows in its scope is one level lower.
    def _title(self, annotated: Annotated, contents: list[Entry]) -> tuple[str, tuple[Section, ...]]:
        first, *rest = annotated.sections or (Section("", ()),)
        if first.label or not first.items or not first.items[0].note.text.startswith("#"):
            return "", annotated.sections
        scope = annotated.row.scope
        self.titled.discard(scope)
        level = self.context.heading = self._level(scope)
        self.titled.add(scope)
        written = self.section(first)
        contents += titles(written, level) if level <= 3 else []
        return written, tuple(rest)

    def _level(self, scope: str) -> int:
        parts = scope.split(".") if scope else []
        around = {".".join(parts[:i]) for i in range(len(parts) + 1)}
        return min(2 + len(parts) + len(around & self.titled), 6)

    # A definition's heading is the link to it. A note has no heading, so it gets a mark in the margin.
    def _head(self, annotated: Annotated, contents: list[Entry]) -> str:
        name, scope, anchor = annotated.row.name, annotated.row.scope, annotated.anchor
        href = html.escape(anchor)
        level = self._level(scope)
        if name:
            last = name.rpartition(".")[2]
            self.context.heading = min(level + 1, 6)
            if level <= 3 and not any(part.startswith("_") for part in name.split(".")):
                contents.append(Entry(level, anchor, last, True))
            return (
                f'<h{level}><a href="#{href}"><code translate="no">{html.escape(last)}</code></a></h{level}>'
            )
        self.context.heading = level
        if not anchor:
            return ""
        return f'<a class="mark" href="#{href}" aria-label="{html.escape(self.words["permalink"])}">#</a>'

    # Blank lines between rows are the page's spacing already; those inside a row are the author's. A
    # comment's lines are its note, and not shown again; only above the introduction, as a licence, they are
    # code.
    def _code(self, annotated: Annotated) -> Iterator[str]:
        source = self.page.source
        assert source is not None
        lines_of_file = source.lines
        for part in annotated.row.parts:
            first, last = part.first, part.last
            if part.kind == "docstring":
                yield self._folded(first, last)
            elif part.kind == "code" or self._is_intro(annotated):
                # After a backslash an empty line ends a statement, and is needed.
                while last >= first and not lines_of_file[last - 1].strip():
                    if last > 1 and lines_of_file[last - 2].endswith("\\"):
                        break
                    last -= 1
                while first <= last and not lines_of_file[first - 1].strip():
                    first += 1
                if first <= last:
                    yield self._pre(first, last)

    # A parser drops one line end right after <pre>, so code that begins with an empty line needs another.
    def _pre(self, first: int, last: int) -> str:
        lines = [self.code[n - 1] + self._shape(n) for n in range(first, last + 1)]
        code = "\n".join(lines)
        return f'<pre data-n="{_numbers(first, last)}">{"" if lines[0] else chr(10)}{code}</pre>'

    def _shape(self, line: int) -> str:
        shape = self.shapes.get(line)
        return f'<b data-shape="{html.escape(shape)}"></b>' if shape else ""

    def _folded(self, first: int, last: int) -> str:
        source = self.page.source
        assert source is not None
        text = html.escape(source.text(first, last), False)
        match = re.match(r"(\s*[A-Za-z]*)(\"\"\"|'''|\"|')", source.lines[first - 1])
        prefix, quote = (match[1], match[2]) if match else ("", '"""')
        folded = html.escape(f"{prefix}{quote}…{quote}", False)
        return (
            f'<details class="doc"><summary data-n="{first}">{folded}</summary>'
            f'<pre data-n="{_numbers(first, last)}"><i class="s">{text}</i></pre></details>'
        )


def _numbers(first: int, last: int) -> str:
    return "\n".join(map(str, range(first, last + 1)))

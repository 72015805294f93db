r"""Reading: one file made into everything a page says, in no language yet.

What depends on the file alone is found here, once: its rows, their notes, anchors and messages. Writing the
page in a language comes after (`writing`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from postil.pages import prose
from postil.pages.anchors import Anchors
from postil.pages.notes import FrontMatter, Section, front_matter, note_of, sections, wants_raw_prefix
from postil.pages.project import Module, Project
from postil.pages.source import Row, Source, SourceError, read_source, split

__all__ = ["Annotated", "Fault", "Page", "read_page"]


@dataclass(frozen=True)
class Fault:
    r"""Something wrong in a source, at a place. A warning does not stop a build."""

    path: str
    line: int
    message: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {'warning: ' if self.is_warning else ''}{self.message}"


@dataclass(frozen=True)
class Annotated:
    r"""A row with its anchor and what its notes say."""

    row: Row
    anchor: str
    sections: tuple[Section, ...]


_EXAMPLE = re.compile(r"^```python example([^\n]*)\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Page:
    r"""A file, read. `source` is None where Python cannot parse it; `text` is then all there is."""

    module: Module
    source: Source | None
    text: str
    front: FrontMatter
    intro: tuple[Section, ...]
    rows: tuple[Annotated, ...]
    faults: tuple[Fault, ...]

    @property
    def title(self) -> str:
        r"""Title of the page: from the docstring, else the module's name."""
        return self.front.title or self.module.name or "__init__"

    def anchors(self) -> list[str]:
        r"""The anchors that are promised to last."""
        return [annotated.anchor for annotated in self.rows if annotated.anchor]

    def messages(self) -> list[tuple[str, str]]:
        r"""Every block to translate, with the anchor where it stands."""
        found = [(text, "page-top") for text in (self.front.title, self.front.description) if text]
        found += [(caption, "page-top") for caption in self.captions()]
        for anchor, section in self._sections():
            for item in section.items:
                found += [(message, anchor) for message, _ in prose.messages(item.note)]
        return found

    def example(self) -> tuple[str, str] | None:
        r"""The page's runnable example, as `(sizes, code)`; see `tracing`."""
        for _, section in self._sections():
            match = _EXAMPLE.search(section.items[0].note.text)
            if match:
                return match[1], match[2]
        return None

    def captions(self) -> list[str]:
        r"""Names of the plots that the example makes, read from its source."""
        try:
            code = ast.parse((self.example() or ("", ""))[1])
        except SyntaxError:
            # Running it will tell.
            return []
        plots = [
            node.value
            for node in code.body
            if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["plots"]
        ]
        keys = plots[-1].keys if plots and isinstance(plots[-1], ast.Dict) else []
        return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]

    def _sections(self) -> Iterator[tuple[str, Section]]:
        yield from (("page-top", section) for section in self.intro)
        for annotated in self.rows:
            yield from ((annotated.anchor, section) for section in annotated.sections)


def read_page(project: Project, module: Module) -> Page:
    r"""Read one file of a project; one that Python cannot parse becomes a page of its bare text."""
    shown = module.file.relative_to(project.home).as_posix()
    try:
        source = read_source(module.file, shown)
    except SourceError as error:
        text = module.file.read_bytes().decode("utf-8", errors="replace")
        fault = Fault(shown, error.line, error.message, is_warning=True)
        return Page(module, None, text, FrontMatter(), (), (), (fault,))
    rows = split(source)
    intro_note = None
    if source.docstring:
        notes = note_of(source, rows[0])
        intro_note = notes[-1] if notes and notes[-1].line == source.docstring[0] else None
    front, intro = front_matter(intro_note)
    anchors = Anchors()
    annotated = []
    for row in rows:
        is_intro = source.docstring is not None and row is rows[0]
        notes = [] if is_intro else note_of(source, row)
        first = notes[0].text if notes else ""
        anchor = "" if is_intro else anchors.of_row(row.name, row.scope, first)
        annotated.append(Annotated(row, anchor, tuple(s for note in notes for s in sections(note))))
    faults = tuple(_raw_prefix_faults(source)) + tuple(_paper_faults(project, front, shown))
    return Page(module, source, "", front, tuple(sections(intro) if intro else ()), tuple(annotated), faults)


# Python reads "\theta" in an ordinary docstring as a tab and "heta". The page shows what was typed; `help()`
# and every other tool will not.
def _raw_prefix_faults(source: Source) -> Iterator[Fault]:
    spans = [source.docstring, *(definition.docstring for definition in source.definitions)]
    for span in filter(None, spans):
        if "\\" in source.text(*span) and wants_raw_prefix(source, span[0]):
            message = "a docstring with backslashes should be raw: put an r before its quotes"
            yield Fault(source.path, span[0], message, is_warning=True)


def _paper_faults(project: Project, front: FrontMatter, shown: str) -> Iterator[Fault]:
    for key in front.papers:
        if key not in project.papers:
            yield Fault(shown, 1, f"paper {key!r} is not in papers.toml")

"""Small projects to build, made where a test wants them."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from postil.pages.notes import Note
from postil.pages.project import Project, open_project
from postil.pages.prose import Context, render
from postil.pages.reading import Page, read_page
from postil.pages.source import Row, Source, parse, split


def project_of(folder: Path, files: dict[str, str], **settings) -> Project:
    """Write files (text or bytes by name) and open the folder as a project of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").touch()
    for name, text in files.items():
        file = folder / "pkg" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
    return open_project(folder / "pkg", **settings)


def page_of(folder: Path, text: str) -> Page:
    """A page of one file."""
    project = project_of(folder, {"one.py": text})
    return read_page(project, project.modules[0])


def rows_of(text: str) -> tuple[Source, list[Row]]:
    """Rows of a text."""
    source = parse(text)
    return source, split(source)


def kinds_of(text: str) -> list[str]:
    """The kind of every line of a text."""
    _, rows = rows_of(text)
    return [part.kind for row in rows for part in row.parts for _ in range(part.first, part.last + 1)]


def html_of(markdown: str, **context) -> tuple[str, list[tuple[int, str]]]:
    """Markdown rendered, and the faults found on the way."""
    faults: list[tuple[int, str]] = []
    full = Context(fault=lambda line, message: faults.append((line, message)), strict=True, **context)
    return render(Note(markdown, 1), full), faults

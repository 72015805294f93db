r"""Notebook: the same page to run and to change.

Notes become text cells and top-level code becomes code cells, in the page's order. What stands inside a
function cannot be cut, so its comments stay in its cell. The format is plain JSON; cells are named by a
hash of file and number, so a notebook built twice is the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from postil.pages.notes import note_of
from postil.pages.project import Project
from postil.pages.reading import Page

__all__ = ["notebook_json"]


def notebook_json(project: Project, page: Page) -> str:
    r"""A page as a Jupyter notebook (format 4.5), as text."""
    cells = [
        {
            "cell_type": kind,
            "id": _identity(page.module.path, i),
            "metadata": {},
            "source": source.splitlines(True),
        }
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for i, (kind, source) in enumerate(_cells(project, page))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def _identity(path: str, number: int) -> str:
    return hashlib.sha256(f"{path}:{number}".encode()).hexdigest()[:12]


def _cells(project: Project, page: Page) -> Iterator[tuple[str, str]]:
    source = page.source
    assert source is not None
    heading = f"# {page.title}\n"
    if page.front.description:
        heading += f"\n{page.front.description}\n"
    for section in page.intro:
        if not section.label:
            heading += f"\n{section.items[0].note.text.strip()}\n"
    yield "markdown", heading
    top, buffer = _top_level(page), []
    for annotated in page.rows[1 if source.docstring else 0 :]:
        row = annotated.row
        notes = [note for note in note_of(source, row) if note.line < _code_line(annotated)]
        if row.first in top and notes:
            yield from _code(buffer)
            buffer = []
            yield "markdown", "\n\n".join(note.text for note in notes)
        first = _code_line(annotated) if row.first in top and notes else row.first
        if row.first in top and not notes and row.name:
            yield from _code(buffer)
            buffer = []
        buffer += source.lines[first - 1 : row.last]
    yield from _code(buffer)


def _code(lines: list[str]) -> Iterator[tuple[str, str]]:
    text = "\n".join(lines).strip("\n")
    if text.strip():
        yield "code", text


def _code_line(annotated: Any) -> int:
    code = annotated.row.lines_of("code")
    return code[0] if code else annotated.row.last + 1


# A row may begin a cell where no statement of the module is under way.
def _top_level(page: Page) -> set[int]:
    assert page.source is not None
    inside: set[int] = set()
    for node in page.source.tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        inside.update(range(first + 1, (node.end_lineno or first) + 1))
    return {annotated.row.first for annotated in page.rows} - inside

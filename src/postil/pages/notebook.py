r"""Notebook: the same page to run and to change.

Notes become text cells and top-level code becomes code cells, in the page's order. What stands inside a
function cannot be cut, so its comments stay in its cell. The format is plain JSON; cells are named by a
hash of file and number, so a notebook built twice is the same file.

What there is to try stands in the module's docstring, under a heading of its own and in blocks that a page
shows like any other code:

    ```python notebook
    print(sample(train(SETTINGS)))
    ```

In the notebook that part comes last, after the code it needs. A block that begins with `python notebook
parameters` is tagged as the cell of parameters, which tools that run notebooks look for and replace. A field
`:requires: package[extra]` says what the notebook installs, from the project's own repository.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from postil.pages.notes import note_of
from postil.pages.project import Module, Project
from postil.pages.prose import path_of
from postil.pages.reading import Page, read_page
from postil.pages.source import Row, Source

__all__ = ["colab_link", "has_trial", "notebook_json", "write_notebooks"]

FOLDER = "notebooks"
BADGE = Path(__file__).parent / "assets/colab.svg"
_BLOCK = re.compile(r"^```python notebook([^\n]*)\n(.*?)^```$", re.M | re.S)
Cell = dict[str, Any]


def notebook_json(project: Project, page: Page) -> str:
    r"""A page as a Jupyter notebook (format 4.5), as text."""
    cells = list(_cells(project, page))
    for number, cell in enumerate(cells):
        cell["id"] = hashlib.sha256(f"{page.module.path}:{number}".encode()).hexdigest()[:12]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def has_trial(page: Page) -> bool:
    r"""True for a page whose docstring brings something to try."""
    return page.source is not None and _BLOCK.search(_introduction(page)) is not None


def write_notebooks(project: Project) -> list[Path]:
    r"""Write the notebooks of all pages that bring something to try into the project's folder for them."""
    folder, written = project.home / str(project.settings.get("notebooks", FOLDER)), []
    for module in project.modules:
        page = read_page(project, module)
        if has_trial(page):
            path = folder / f"{module.path[:-3]}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(notebook_json(project, page), encoding="utf-8", newline="\n")
            written.append(path)
    return written


def colab_link(project: Project, module: Module) -> str:
    r"""The address that opens a notebook on Colab, or nothing for one that is in no repository on GitHub."""
    repository = str(project.settings.get("repository", "")).rstrip("/")
    folder = str(project.settings.get("notebooks", FOLDER))
    if not repository.startswith("https://github.com/"):
        return ""
    name, path = repository.removeprefix("https://github.com/"), path_of(module.path[:-3])
    return f"https://colab.research.google.com/github/{name}/blob/main/{folder}/{path}.ipynb"


def _text(text: str, **more: Any) -> Cell:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip("\n").splitlines(True), **more}


def _code(text: str, *tags: str) -> Cell:
    own = {"cell_type": "code", "execution_count": None, "outputs": []}
    return own | {"metadata": {"tags": list(tags)} if tags else {}, "source": text.splitlines(True)}


def _cells(project: Project, page: Page) -> Iterator[Cell]:
    before, trial = _split(_introduction(page))
    yield _heading(project, page, before)
    if has_trial(page):
        yield from _installation(project, page)
    for kind, source in _page_cells(page):
        yield _text(_cited(project, source)) if kind == "text" else _code(source)
    at = 0
    for block in _BLOCK.finditer(trial):
        if words := trial[at : block.start()].strip():
            yield _text(_cited(project, words))
        yield _code(block[2].rstrip("\n"), *block[1].split())
        at = block.end()
    if words := trial[at:].strip():
        yield _text(_cited(project, words))


# The badge is attached to its cell, and so goes wherever the file goes, and asks nobody.
def _heading(project: Project, page: Page, introduction: str) -> Cell:
    link = colab_link(project, page.module) if has_trial(page) else ""
    badge = f"[![Open in Colab](attachment:colab.svg)]({link})" if link else ""
    paragraphs = (f"# {page.title}", badge, page.front.description, introduction)
    text = _cited(project, "\n\n".join(part for part in paragraphs if part))
    if not link:
        return _text(text)
    picture = base64.b64encode(BADGE.read_bytes()).decode()
    return _text(text, attachments={"colab.svg": {"image/svg+xml": picture}})


# What is installed comes from the repository that the notebook itself is from. A package of the same name
# elsewhere may be somebody else's.
def _installation(project: Project, page: Page) -> Iterator[Cell]:
    repository = str(project.settings.get("repository", "")).rstrip("/")
    if not repository:
        return
    package = page.front.fields.get("requires", project.root.name)
    name = re.split(r"\W", package)[0]
    yield _code(
        f"# Where {name} is not installed yet.\n"
        "from importlib.util import find_spec\n\n"
        f'if find_spec("{name}") is None:\n'
        f'    %pip install --quiet "{package} @ git+{repository}"'
    )


# A notebook travels alone, and the files that a page's pictures are made of do not come along.
_PICTURE = re.compile(r"^!\[[^\]]*\]\([^)\s]+\)\n*", re.M)


def _introduction(page: Page) -> str:
    text = "\n\n".join(section.items[0].note.text.strip() for section in page.intro if not section.label)
    return _PICTURE.sub("", text)


# The trial begins at the heading above its first block.
def _split(text: str) -> tuple[str, str]:
    block = _BLOCK.search(text)
    if block is None:
        return text, ""
    headings = [found.start() for found in re.finditer(r"^#+ ", text[: block.start()], re.M)]
    cut = headings[-1] if headings else block.start()
    return text[:cut], text[cut:]


# A page turns the key of a paper into a link. Elsewhere it would be a word in brackets.
def _cited(project: Project, text: str) -> str:
    def link(key: re.Match[str]) -> str:
        paper = project.papers.get(key[1])
        return f"[{paper.label}]({paper.href})" if paper else key[0]

    return re.sub(r"\[(\w+)\](?![(\[:])", link, text)


# ## The page itself
def _page_cells(page: Page) -> Iterator[tuple[str, str]]:
    source = page.source
    assert source is not None
    top, buffer = _top_level(page), []
    for annotated in page.rows[1 if source.docstring else 0 :]:
        row = annotated.row
        notes = [note for note in note_of(source, row) if note.line < _code_line(source, row)]
        if row.first in top and (notes or row.name):
            yield from _joined(buffer)
            buffer = []
        if row.first in top and notes:
            yield "text", "\n\n".join(note.text for note in notes)
        first = _code_line(source, row) if row.first in top and notes else row.first
        lines = range(first, row.last + 1)
        buffer += [source.lines[line - 1] for line in lines if line not in _script(page)]
    yield from _joined(buffer)


def _joined(lines: list[str]) -> Iterator[tuple[str, str]]:
    text = "\n".join(lines).strip("\n")
    if text.strip():
        yield "code", text


def _code_line(source: Source, row: Row) -> int:
    code = (line for line in row.lines_of("code") if source.lines[line - 1].strip())
    return next(code, row.last + 1)


# A notebook's module is called `__main__` as well, and what a script does when it is called is not wanted.
def _script(page: Page) -> set[int]:
    assert page.source is not None
    lines: set[int] = set()
    for node in page.source.tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


# A row may begin a cell where no statement of the module is under way.
def _top_level(page: Page) -> set[int]:
    assert page.source is not None
    inside: set[int] = set()
    for node in page.source.tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        inside.update(range(first + 1, (node.end_lineno or first) + 1))
    return {annotated.row.first for annotated in page.rows} - inside

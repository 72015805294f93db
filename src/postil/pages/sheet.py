r"""Sheet: everything around a page's notes and code.

The template gets plain values and decides nothing; what depends on the page's place in the site (the way up,
the neighbours, the other languages, addresses for machines) is worked out here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from postil.pages import interface
from postil.pages.notebook import colab_link, has_trial
from postil.pages.project import Module, Project, source_copy
from postil.pages.prose import path_of
from postil.pages.reading import Page
from postil.pages.writing import TEMPLATES, Written

__all__ = ["Sheet", "page_html", "surroundings"]


@dataclass
class Sheet:
    r"""A written page and where it stands: its number in the order, its language, all pages' titles."""

    project: Project
    pages: list[Page]
    position: int
    language: str
    written: Written
    lost: dict[str, str]
    titles: dict[str, tuple[str, str]]


def page_html(sheet: Sheet) -> str:
    r"""The whole page."""
    page = sheet.pages[sheet.position]
    module, front, written = page.module, page.front, sheet.written
    neighbours = [
        sheet.pages[i] if 0 <= i < len(sheet.pages) else None
        for i in (sheet.position - 1, sheet.position + 1)
    ]
    title, description = sheet.titles[module.url]
    root = "../" * module.url.count("/")
    values = surroundings(sheet.project, sheet.language, module.url)
    top = [old for old, new in sheet.lost.items() if new == "page-top"]
    values.update(
        title=title,
        title_lang="en" if sheet.language != "en" and title in (front.title, module.name) else "",
        description=description,
        description_lang="en" if sheet.language != "en" and description == front.description else "",
        page=page,
        written=written,
        contents=written.contents,
        parents=list(_parents(sheet, module, root)),
        children=_children(sheet, module, root) if module.is_package else [],
        previous=_neighbour(sheet, neighbours[0], root),
        next=_neighbour(sheet, neighbours[1], root),
        papers=[sheet.project.papers[key] for key in front.papers if key in sheet.project.papers],
        source_link=sheet.project.source_link(module) or f"{values['site']}{path_of(source_copy(module))}",
        **_notebook(sheet.project, page, values["site"]),
        top_anchors=top,
    )
    return TEMPLATES.get_template("page.html").render(values)


def surroundings(project: Project, language: str, url: str) -> dict[str, Any]:
    r"""Values every template needs: where the root is, words, languages, addresses for machines."""
    depth = url.count("/")
    site = "../" * (depth + (language != "en"))
    base = str(project.settings.get("base_url", "")).rstrip("/")
    here = url if language == "en" else f"{interface.tag(language)}/{url}"
    languages = []
    for other in ["en", *project.languages]:
        path = url if other == "en" else f"{interface.tag(other)}/{url}"
        href = site + path_of(path)
        absolute = f"{base}/{path_of(path)}" if base else href
        languages.append(
            {"tag": interface.tag(other), "name": interface.LANGUAGE_NAMES.get(other, other), "href": href,
             "absolute": absolute, "current": other == language}
        )  # fmt: skip
    return {
        # A namespace: in a template the attribute `copy` of a dictionary is its method, not its entry.
        "words": SimpleNamespace(**interface.words(language)),
        "lang": interface.tag(language),
        "site": site,
        "root": "../" * depth,
        "languages": languages,
        "canonical": f"{base}/{path_of(here)}" if base else site + path_of(here),
        "project": project,
        "stylesheet": bool(project.settings.get("stylesheet")),
        "url": url,
    }


def _parents(sheet: Sheet, module: Module, root: str) -> Iterator[tuple[str, str]]:
    known = {page.module.url for page in sheet.pages}
    parts = module.name.split(".") if module.name else []
    for i in range(1, len(parts)):
        url = "/".join(parts[:i]) + "/index.html"
        yield parts[i - 1], root + path_of(url) if url in known else ""


def _children(sheet: Sheet, module: Module, root: str) -> list[dict[str, Any]]:
    prefix = f"{module.name}." if module.name else ""
    found = []
    for page in sheet.pages:
        name = page.module.name
        if name.startswith(prefix) and name != module.name and page.module.path != module.path:
            title, description = sheet.titles[page.module.url]
            found.append(
                {"depth": name.removeprefix(prefix).count("."), "href": root + path_of(page.module.url),
                 "title": title, "description": description, "name": name.rpartition(".")[2]}
            )  # fmt: skip
    return found


def _neighbour(sheet: Sheet, page: Page | None, root: str) -> dict[str, str] | None:
    if page is None:
        return None
    return {"href": root + path_of(page.module.url), "title": sheet.titles[page.module.url][0]}


# Every page could be a notebook; those are offered that bring something to try.
def _notebook(project: Project, page: Page, site: str) -> dict[str, str]:
    if project.settings.get("notebooks") is None or not has_trial(page):
        return {"notebook": "", "colab": ""}
    here = f"{site}_notebooks/{path_of(page.module.path[:-3])}.ipynb"
    return {"notebook": here, "colab": colab_link(project, page.module)}

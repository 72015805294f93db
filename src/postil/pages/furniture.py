r"""Furniture: what a site has besides its pages.

Style sheet, scripts, fonts, search, the map for search engines and the list for language models. None of it
is asked from anyone else, now or when a reader opens the site.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from postil.pages import interface
from postil.pages.notebook import has_trial, notebook_json
from postil.pages.project import Project, source_copy
from postil.pages.prose import inline_text, path_of
from postil.pages.reading import Page
from postil.pages.searching import index_script
from postil.pages.sheet import surroundings
from postil.pages.writing import TEMPLATES

__all__ = ["write_furniture"]

ASSETS = Path(__file__).parent / "assets"


def write_furniture(
    project: Project,
    pages: list[Page],
    stage: Path,
    entries: dict[str, dict[str, Any]],
    media: dict[str, Path],
) -> None:
    r"""Write everything into `stage` that is not a page."""
    assets = stage / "_assets"
    assets.mkdir()
    for file in sorted(ASSETS.iterdir()):
        if file.suffix in (".css", ".js"):
            _write(assets / file.name, _slim(file.read_text(encoding="utf-8")))
        elif file.suffix in (".woff2", ".svg", ".txt"):
            shutil.copyfile(file, assets / file.name)
    for page in pages:
        if not project.source_link(page.module):
            copy = stage / source_copy(page.module)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page.module.file, copy)
    if project.settings.get("stylesheet"):
        shutil.copyfile(project.home / project.settings["stylesheet"], assets / "project.css")
    for name, file in sorted(media.items()):
        (stage / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, stage / name)
    for language in ["en", *project.languages]:
        _write(assets / f"index.{interface.tag(language)}.js", index_script(pages, entries, language))
        folder = stage if language == "en" else stage / interface.tag(language)
        for name in ("search.html", "404.html"):
            values = surroundings(project, language, name)
            _write(folder / name, TEMPLATES.get_template(name).render(values, pages=pages))
        if not any(page.module.url == "index.html" for page in pages):
            values = surroundings(project, language, "index.html")
            _write(folder / "index.html", TEMPLATES.get_template("index.html").render(values, pages=pages))
    _write(stage / "llms.txt", _for_language_models(project, pages))
    if project.settings.get("base_url"):
        _write(stage / "sitemap.xml", _sitemap(project, pages))
    if project.settings.get("notebooks") is not None:
        for page in pages:
            if has_trial(page):
                file = stage / "_notebooks" / f"{page.module.path[:-3]}.ipynb"
                _write(file, notebook_json(project, page))


# Comments and indentation are for who works on these files; a fifth of their bytes need not travel.
def _slim(text: str) -> str:
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line and not line.startswith(("//", "/*"))) + "\n"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="\n")


def _sitemap(project: Project, pages: list[Page]) -> str:
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9" xmlns:xhtml="http://www.w3.org/1999/xhtml">',
    ]
    for page in pages:
        languages = surroundings(project, "en", page.module.url)["languages"]
        for language in languages:
            lines.append(f"<url><loc>{escape(language['absolute'])}</loc>")
            for other in languages if len(languages) > 1 else []:
                href = escape(other["absolute"], {'"': "&quot;"})
                lines.append(f'<xhtml:link rel="alternate" hreflang="{other["tag"]}" href="{href}"/>')
            lines.append("</url>")
    return "\n".join([*lines, "</urlset>", ""])


def _for_language_models(project: Project, pages: list[Page]) -> str:
    base = str(project.settings.get("base_url", "")).rstrip("/")
    lines = [f"# {project.title}", ""]
    if project.settings.get("description"):
        lines += [f"> {project.settings['description']}", ""]
    lines += ["## Pages", ""]
    for page in pages:
        address = f"{base}/{path_of(page.module.url)}" if base else path_of(page.module.url)
        description = f": {_plain(page.front.description)}" if page.front.description else ""
        lines.append(f"- [{_plain(page.title)}]({address}){description}")
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    return inline_text(text).replace("[", "(").replace("]", ")")

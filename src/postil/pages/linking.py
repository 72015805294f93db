r"""Linking: where a name, a relative link and a picture lead.

A name in code font that some page defines becomes a link to its definition. A relative link may name a
source file (`masks.py`, `masks.py#Mask`) or a page (`masks.html`), from the folder of the file it stands in;
pictures are files of the project, drawings become part of the page.
"""

from __future__ import annotations

import hashlib
import html
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from postil.pages.curves import curve_figure
from postil.pages.figures import FigureError, inline_svg
from postil.pages.project import Project
from postil.pages.prose import Context, path_of
from postil.pages.reading import Fault, Page

__all__ = ["Links"]

_MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".gif")


class Links:
    r"""Addresses of everything a page may point at."""

    def __init__(self, project: Project, pages: list[Page]):
        self.project = project
        self.pages = {page.module.url: page for page in pages}
        self.by_path = {page.module.path: page.module.url for page in pages}
        self.by_name = {page.module.name: page.module.url for page in pages if page.module.name}
        self.names = _names(project, pages)
        self.media: dict[str, Path] = {}

    def fingerprint(self) -> list[Any]:
        r"""What pages know of one another: addresses, titles, names."""
        titles = [(url, page.title, page.front.description) for url, page in self.pages.items()]
        return [titles, sorted(self.names.items())]

    def resolver(self, page: Page) -> Callable[[str], str | None]:
        r"""Where a name in code font leads from this page: here first, then to the only page that has it.

        The page of a package tells of its modules, so there the name of a module is the module.
        """
        here = page.module.url
        own = {a.row.name: a.anchor for a in page.rows if a.row.name}
        inside = f"{page.module.name}." if page.module.name else ""

        def resolve(text: str) -> str | None:
            name = text.removesuffix("()")
            if name in own:
                return f"#{own[name]}"
            if page.module.is_package and f"{inside}{name}" in self.by_name:
                return _relative(self.by_name[f"{inside}{name}"], here)
            url, anchor = self.names.get(name, ("", ""))
            return f"{_relative(url, here)}{'#' + anchor if anchor else ''}" if url and url != here else None

        return resolve

    def addresser(
        self, page: Page, seen: list[tuple[int, str, str]], context: Context
    ) -> Callable[[str], str | None]:
        r"""Where a relative link leads; every link is noted in `seen` so that its anchor can be checked."""
        folder = posixpath.dirname(page.module.path)

        def address(target: str) -> str | None:
            path, _, anchor = target.partition("#")
            anchor = unquote(anchor)
            if not path:
                seen.append((context.line, page.module.url, anchor))
                return f"#{html.unescape(path_of(anchor))}"
            wanted = posixpath.normpath(posixpath.join(folder, unquote(path)))
            url = self.by_path.get(wanted) or self.by_path.get(f"{wanted}/__init__.py") or wanted
            if url not in self.pages:
                return self._in_repository(page, unquote(path))
            seen.append((context.line, url, anchor))
            return _relative(url, page.module.url) + (f"#{path_of(anchor)}" if anchor else "")

        return address

    def _in_repository(self, page: Page, path: str) -> str | None:
        r"""A file of the project that has no page, at its commit."""
        repository = str(self.project.settings.get("repository", "")).rstrip("/")
        file = self._inside(page, path)
        if file is None or not repository or not self.project.commit:
            return None
        return f"{repository}/blob/{self.project.commit}/{file.relative_to(self.project.home).as_posix()}"

    def _inside(self, page: Page, path: str) -> Path | None:
        base = self.project.home if path.startswith("/") else page.module.file.parent
        file = (base / path.lstrip("/")).resolve()
        return file if file.is_file() and file.is_relative_to(self.project.home) else None

    def picturer(self, page: Page, root: str) -> Callable[[str, str], str]:
        r"""A picture as HTML: drawings and curves stand in the page, the rest are files at `root`.

        Results that are not there yet give nothing.
        """

        def picture(source: str, label: str) -> str:
            file = self._inside(page, unquote(source))
            if file is None:
                if source.endswith(".json"):
                    return ""
                raise FileNotFoundError("no such file in this project")
            data = file.read_bytes()
            if file.suffix == ".json":
                return curve_figure(data.decode("utf-8", errors="strict"), label)
            digest = hashlib.sha256(data).hexdigest()[:10]
            if file.suffix == ".svg":
                drawing = inline_svg(data.decode("utf-8", errors="strict"), label, f"f{digest[:6]}")
                return f'<span class="figure">{drawing}</span>'
            if file.suffix.lower() not in _MEDIA:
                raise FigureError(f"a picture is one of .svg .json {' '.join(_MEDIA)}")
            return f'<img src="{root}{_media_name(data, file)}" alt="{html.escape(label)}" loading="lazy">'

        return picture

    def pictures_of(self, page: Page) -> list[str]:
        r"""Names and digests of the pictures a page may show; those that are files are kept for the site."""
        text = "\n".join(page.source.lines) if page.source else ""
        found = []
        for path in re.findall(r"!\[[^\]]*\]\(([^)\s]+)", text):
            file = self._inside(page, unquote(path))
            if file:
                name = _media_name(file.read_bytes(), file)
                found.append(name)
                if file.suffix.lower() in _MEDIA:
                    self.media[name] = file
        return found

    def broken(self, entries: dict[str, dict[str, Any]]) -> list[Fault]:
        r"""Links whose page exists but whose anchor does not."""
        faults = []
        for key, entry in entries.items():
            language, _, url = key.partition(":")
            if language != "en":
                continue
            page = self.pages[url]
            path = page.source.path if page.source else page.module.path
            for line, target, anchor in entry["links"]:
                if anchor and anchor not in entries[f"en:{target}"]["ids"]:
                    faults.append(Fault(path, line, f"a link to {anchor!r}: {target} has no such anchor"))
        return faults


def _media_name(data: bytes, file: Path) -> str:
    return f"_media/{hashlib.sha256(data).hexdigest()[:12]}{file.suffix.lower()}"


def _relative(url: str, here: str) -> str:
    return path_of(posixpath.relpath(url, posixpath.dirname(here) or "."))


# A name that two pages define leads nowhere unless it is written out with its module.
def _names(project: Project, pages: list[Page]) -> dict[str, tuple[str, str]]:
    package = project.root.name
    full: dict[str, tuple[str, str]] = {}
    short: dict[str, set[tuple[str, str]]] = {}
    for page in pages:
        url, module = page.module.url, page.module.name
        for prefix in {module, f"{package}.{module}" if module else package}:
            if "." in prefix or prefix == package:
                full[prefix] = (url, "")
            for annotated in page.rows:
                name = annotated.row.name
                if name and not name.startswith("_"):
                    full[f"{prefix}.{name}"] = (url, annotated.anchor)
        for annotated in page.rows:
            name = annotated.row.name
            if name and not any(part.startswith("_") for part in name.split(".")):
                short.setdefault(name, set()).add((url, annotated.anchor))
    unique = {name: next(iter(places)) for name, places in short.items() if len(places) == 1}
    return {**unique, **full}

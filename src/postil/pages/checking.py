r"""Checking: what a reader would stumble over, found first.

Links and anchors are checked on the finished pages, as a browser sees them; formulas by building;
translations against their English and the glossary; colours by the contrast formula of WCAG 2 in both
themes.
"""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from postil.pages.furniture import ASSETS
from postil.pages.project import Project
from postil.pages.proofreading import proofread, read_glossary, stale
from postil.pages.reading import Fault, read_page
from postil.pages.site import build_site

__all__ = ["check_contrast", "check_project", "check_site", "contrast"]


def check_project(project: Project, *, complete: bool = True) -> list[Fault]:
    r"""Everything: a build in a temporary folder, its links, the translations, the colours.

    `complete` also wants every block translated in every language of the project.
    """
    faults: list[Fault] = []
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        built = build_site(project, site, lenient=True, keep_lock=False)
        faults += [
            fault for fault in built.warnings if not fault.is_warning or "cannot read this" in fault.message
        ]
        faults += check_site(site)
    pages = [read_page(project, module) for module in project.modules]
    for language in project.languages:
        glossary = read_glossary(project.locale / "glossary.csv", language)
        for page in pages:
            if complete:
                faults += stale(project, page, language)
            faults += proofread(project, page, language, glossary)
    sheets = [ASSETS / "page.css"]
    if project.settings.get("stylesheet"):
        sheets.append(project.home / project.settings["stylesheet"])
    faults += check_contrast(sheets)
    return list(dict.fromkeys(faults))


class _Outline(HTMLParser):
    r"""The ids of a page, and every address it names."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[tuple[str, int]] = []
        self.links: list[tuple[str, int]] = []
        self.requests: list[tuple[str, int]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        r"""Note what a tag points at."""
        values = {name: value or "" for name, value in attrs}
        line = self.getpos()[0]
        if "id" in values:
            self.ids.append((values["id"], line))
        if tag == "a" and "href" in values:
            self.links.append((values["href"], line))
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.requests.append((values["href"], line))
        elif "src" in values:
            self.requests.append((values["src"], line))


def check_site(site: Path) -> Iterator[Fault]:
    r"""Broken links and anchors, ids given twice, and requests to other machines, in every page of a site."""
    outlines = {file.relative_to(site).as_posix(): _outline(file) for file in sorted(site.rglob("*.html"))}
    for name, outline in outlines.items():
        seen: set[str] = set()
        for identity, line in outline.ids:
            if identity in seen:
                yield Fault(name, line, f"the id {identity!r} is given twice")
            seen.add(identity)
        for address, line in outline.requests:
            if urlsplit(address).scheme or address.startswith("//"):
                yield Fault(name, line, f"asks another machine for {address}")
            elif not (site / posixpath.dirname(name) / unquote(urlsplit(address).path)).is_file():
                yield Fault(name, line, f"the file {address} does not exist")
        for address, line in outline.links:
            fault = _broken(site, name, address, outlines)
            if fault:
                yield Fault(name, line, fault)


def _outline(file: Path) -> _Outline:
    outline = _Outline()
    outline.feed(file.read_text(encoding="utf-8"))
    outline.close()
    return outline


def _broken(site: Path, name: str, address: str, outlines: dict[str, _Outline]) -> str:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return ""
    path = (
        posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
        if parts.path
        else name
    )
    if path.startswith(".."):
        return f"the link {address} leads out of the site"
    if path not in outlines:
        return "" if (site / path).is_file() else f"the link {address} leads nowhere"
    anchor = unquote(parts.fragment)
    if anchor and anchor not in {identity for identity, _ in outlines[path].ids}:
        return f"the link {address}: no such anchor"
    return ""


_TEXT = (
    "text",
    "muted",
    "accent",
    "keyword",
    "string",
    "comment",
    "defined",
    "parameter",
    "builtin",
    "bad",
)
_GROUNDS = ("page", "panel")
LEAST = 4.5


def contrast(one: str, other: str) -> float:
    r"""Contrast of two colours `#rrggbb` by WCAG 2: $(L_1 + 0.05) / (L_2 + 0.05)$ of their luminances."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


_COLOUR = re.compile(r"--([\w-]+):\s*(?:light-dark\()?(#[0-9a-fA-F]{6})\b(?:,\s*(#[0-9a-fA-F]{6})\b)?")


# The last sheet wins, as in a browser, and a colour given once counts for both themes.
def check_contrast(sheets: list[Path]) -> Iterator[Fault]:
    r"""Text colours too close to a ground they stand on, in the light and the dark theme."""
    themes: dict[str, dict[str, tuple[str, str, int]]] = {"light": {}, "dark": {}}
    for sheet in sheets:
        text = sheet.read_text(encoding="utf-8")
        for match in re.finditer(r"(:root[^{]*)\{([^}]*)\}", text):
            dark = "dark" in match[1] or 'not([data-theme="light"])' in match[1]
            for rule in _COLOUR.finditer(match[2]):
                line = text.count("\n", 0, match.start(2) + rule.start()) + 1
                if not dark:
                    themes["light"][rule[1]] = (rule[2], sheet.name, line)
                if dark or '[data-theme="light"]' not in match[1]:
                    themes["dark"][rule[1]] = (rule[3] or rule[2], sheet.name, line)
    for theme, colours in themes.items():
        for name in _TEXT:
            for ground in _GROUNDS + (("lit",) if name == "text" else ()):
                if name in colours and ground in colours:
                    ratio = contrast(colours[name][0], colours[ground][0])
                    if ratio < LEAST:
                        _, sheet, line = colours[name]
                        message = f"{theme}: --{name} on --{ground} has contrast {ratio:.2f}, below {LEAST}"
                        yield Fault(sheet, line, message)

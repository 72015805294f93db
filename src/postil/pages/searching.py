r"""Searching: what the search box knows.

One entry for each note and each definition, in the page's language. The index is a classic script, because a
page opened from a disk may not fetch anything; the search itself is MiniSearch, loaded when a reader first
types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from postil.pages import prose
from postil.pages.notes import Section
from postil.pages.reading import Page

__all__ = ["index_script", "search_entries"]

Translate = Callable[[str], str | None]


def search_entries(page: Page, translate: Translate) -> Iterator[tuple[str, str, str]]:
    r"""Entries `(anchor, heading, words)` of a page; the first is the page itself."""
    title = translate(page.front.title) or page.title
    description = translate(page.front.description) if page.front.description else ""
    said = prose.inline_text(description or page.front.description)
    yield "", prose.inline_text(title), f"{said} {_words(page.intro, translate)}".strip()
    for annotated in page.rows:
        if annotated.anchor:
            yield (
                annotated.anchor,
                annotated.row.name or annotated.row.scope,
                _words(annotated.sections, translate),
            )


def _words(sections: tuple[Section, ...], translate: Translate) -> str:
    found = []
    for section in sections:
        for item in section.items:
            found += [item.term, prose.plain_text(item.note, translate)]
    return " ".join(word for word in found if word)


def index_script(pages: list[Page], entries: dict[str, dict[str, Any]], language: str) -> str:
    r"""The index of one language: titles of the pages, and entries that point at them by number."""
    titles, documents = [], []
    for number, page in enumerate(pages):
        found = entries[f"{language}:{page.module.url}"]["search"]
        titles.append([page.module.url, found[0][1]])
        documents += [[number, anchor, heading, words] for anchor, heading, words in found]
    data = json.dumps([titles, documents], ensure_ascii=False, separators=(",", ":"))
    # These two are line ends to an older JavaScript.
    data = data.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f"var postilIndex = {data};\n"

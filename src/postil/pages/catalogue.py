r"""Catalogue: the translations of one page in one language, as gettext keeps them.

One PO file for a page and a language, one message for a block. Code never enters a message, so a translation
can lag behind the words of a note but never behind its code. The reference of a message is an anchor of the
page instead of a line, so that moving code changes no PO file.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import PoFileError, read_po, write_po

__all__ = ["Catalogue", "po_file", "read_catalogue", "template", "update", "write_catalogue"]


@dataclass(frozen=True)
class Catalogue:
    r"""What `translate` looks up: current translations only."""

    translations: dict[str, str]

    def translate(self, message: str) -> str | None:
        r"""The translation of a block, or None where it is missing or its English has changed since."""
        return self.translations.get(message)


def po_file(locale: Path, language: str, name: str) -> Path:
    r"""Where the translations of a page live; the root package's page is called `__init__`."""
    return locale / language / "LC_MESSAGES" / f"{name or '__init__'}.po"


def template(messages: list[tuple[str, str]], language: str | None = None) -> Catalog:
    r"""A catalogue of a page's messages, each with the anchors where it stands."""
    catalog = Catalog(locale=language, charset="utf-8", fuzzy=False)
    for message, anchor in messages:
        catalog.add(message, locations=[(f"#{anchor}", 1)])
    return catalog


def read_catalog(file: Path, language: str) -> Catalog | None:
    r"""Read a PO file, or None where there is none.

    Raises:
        ValueError: the file is not a PO file.
    """
    if not file.is_file():
        return None
    try:
        return read_po(io.BytesIO(file.read_bytes()), locale=language, abort_invalid=True)
    except (PoFileError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


# A fuzzy message is one whose English changed after it was translated. Its translation is kept for the
# translator and hidden from the reader.
def read_catalogue(file: Path, language: str) -> Catalogue:
    r"""The current translations of a page; none where the file does not exist."""
    catalog = read_catalog(file, language)
    found = {}
    for message in catalog or ():
        if message.id and message.string and not message.fuzzy:
            found[_text(message.id)] = _text(message.string)
    return Catalogue(found)


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value[0])  # pyright: ignore[reportIndexIssue]


def update(catalog: Catalog | None, fresh: Catalog) -> Catalog:
    r"""Bring a catalogue to a page's present messages.

    A message that changed a little keeps its old translation, marked fuzzy; one that is gone
    is kept as obsolete.
    """
    if catalog is None:
        return fresh
    catalog.update(fresh, no_fuzzy_matching=False, update_header_comment=False)
    return catalog


# Babel takes every brace for a Python format string and writes the current time into every file; both would
# change files nobody touched.
def write_catalogue(file: Path, catalog: Catalog) -> None:
    r"""Write a PO file, always the same bytes for the same messages."""
    for message in catalog:
        message.flags -= {"python-format", "python-brace-format"}
    file.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    write_po(buffer, catalog, width=100, omit_header=True, include_lineno=False, sort_output=False)
    header = (
        'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=utf-8\\n"\n'
        f'"Content-Transfer-Encoding: 8bit\\n"\n"Language: {catalog.locale_identifier or ""}\\n"\n\n'
    )
    file.write_bytes(header.encode() + buffer.getvalue())

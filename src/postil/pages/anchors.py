r"""Anchors: addresses inside a page that outlive an edit.

A definition's anchor is its qualified name. A note inside it adds the note's first words,
`Mask.padding~the-length`, so a line more or a note less elsewhere moves nothing. When an anchor does go, the
**lock** remembers it: a link to a note that was reworded leads to its definition, a link to a definition
that left leads to the nearest thing around it that is still there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

__all__ = ["Anchors", "read_lock", "write_lock"]

Lock = dict[str, dict[str, str]]

# Names that the page itself uses. They hold a hyphen, so no Python name can be one of them.
RESERVED = ("page-top", "page-content", "page-contents", "page-search", "page-terms")


class Anchors:
    r"""The ids of one page, each given out once."""

    def __init__(self) -> None:
        self.taken: dict[str, None] = dict.fromkeys(RESERVED)

    def take(self, wanted: str, separator: str = "-") -> str:
        r"""Return `wanted`, or with `-2`, `-3` ... where it is taken."""
        anchor, count = wanted, 1
        while anchor in self.taken:
            count += 1
            anchor = f"{wanted}{separator}{count}"
        self.taken[anchor] = None
        return anchor

    def of_row(self, name: str, scope: str, note: str) -> str:
        r"""The anchor of a row, or nothing for a row that has neither a name nor a note."""
        if name:
            return self.take(name, "~")
        words = re.findall(r"\w+", note.replace("$", ""))[:3]
        return self.take(f"{scope}~{'-'.join(words).lower()}") if words else ""


def lost(anchors: Anchors, known: dict[str, str]) -> dict[str, str]:
    r"""For anchors a lock knows and the page has no more: where a link to them leads now."""
    moved = {}
    for old, target in known.items():
        if old in anchors.taken:
            continue
        candidates = [target, *_around(target), *_around(old)]
        moved[old] = next((c for c in candidates if c in anchors.taken), "page-top")
    return moved


def _around(anchor: str) -> list[str]:
    scope, tilde, _ = anchor.partition("~")
    names = scope.split(".")
    first = [scope] if tilde else []
    return first + [".".join(names[:i]) for i in range(len(names) - 1, 0, -1)]


def read_lock(file: Path) -> Lock:
    r"""Read a lock: for each page, every anchor it ever had and where that leads. A missing file is empty."""
    if not file.is_file():
        return {}
    lock = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(lock, dict) or not all(isinstance(page, dict) for page in lock.values()):
        raise ValueError(f"{file}: not a lock of anchors; it should map pages to their anchors")
    return lock


# Only anchors made from names and notes are promised. Written one a line and sorted, a lock merges like code.
def merged(lock: Lock, page: str, anchors: list[str]) -> None:
    r"""Add a page's anchors to a lock; entries that lead elsewhere are kept."""
    entries = lock.setdefault(page, {})
    for anchor in anchors:
        entries[anchor] = anchor


def write_lock(file: Path, lock: Lock) -> None:
    r"""Write a lock."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(lock, indent=1, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")

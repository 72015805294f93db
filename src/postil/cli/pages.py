r"""`postil pages`: the publisher, which knows nothing of the rest."""

from __future__ import annotations

from postil.pages.cli import main as publish

__all__ = ["run"]


def run(argv: list[str]) -> int:
    r"""Hand the arguments over."""
    return publish(argv)

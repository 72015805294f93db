r"""Random input by the thousand: a faster way to find what nobody thought of.

`POSTIL_FUZZ=1000` multiplies how many inputs each test tries. Each reports how many it tried, and how many
of them were taken for good, into `.pytest_cache/fuzz.json`, from where `docs/make_reliability.py` reads it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest


class Tally:
    r"""How many inputs of one kind were tried, and how each ended."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def add(self, outcome: str) -> None:
        self.outcomes[outcome] += 1


@pytest.fixture
def tally(request: pytest.FixtureRequest):
    count = Tally()
    yield count
    file = Path(request.config.rootpath) / ".pytest_cache" / "fuzz" / f"{request.node.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dict(count.outcomes)))

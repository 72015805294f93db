"""The page of promises says what the tests hold, today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("make_reliability", DOCS / "make_reliability.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(generator) -> None:
    shown = (DOCS / "reliability.md").read_text(encoding="utf-8")
    assert shown == generator.page(), "run: python docs/make_reliability.py"


def test_every_case_is_held_and_every_fault_named(generator) -> None:
    cases, _ = generator.collect()
    assert len(generator.rows("cases.csv")) == 92 == len([c for c in cases if cases[c]])
    promises = generator.rows("promises.csv")
    assert [row["id"] for row in promises if row["kind"] == "fault"] == [f"F{n}" for n in range(1, 19)]


def test_a_promise_without_its_test_is_an_error(generator, monkeypatch) -> None:
    cases, tests = generator.collect()
    monkeypatch.setattr(
        generator, "collect", lambda: (cases, tests - {sorted(tests)[0]} - set(cases["BC053"]))
    )
    with pytest.raises(ValueError, match="no such test"):
        generator.page()

"""The figures in README.md are those of the committed results."""

from __future__ import annotations

import json

import pytest

import readme


def test_the_table_in_the_readme_is_current():
    page = readme.PAGE.read_text(encoding="utf-8")
    assert readme.with_table(page) == page


def test_a_figure_comes_from_its_results(tmp_path):
    assert "not measured yet" in readme.table(tmp_path)
    rows = [
        {"what": "training pass", "threads": 1, "ratio": {"median": 0.123}},
        {"what": "writing 1000 characters", "threads": 1, "ratio": {"median": 45.6}},
    ]
    (tmp_path / "transformer.json").write_text(json.dumps({"rows": rows}))
    page = readme.table(tmp_path)
    assert "| 0.12 |" in page and "| 46 times faster |" in page


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(ValueError, match="marks"):
        readme.with_table("# Something else")

# ruff: noqa: E501  (made files are read whole)
"""Learning curves of a file of results, as a figure of a page that appears when the file does."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from postil.pages.curves import curve_figure, read_curves
from postil.pages.figures import FigureError
from postil.pages.project import open_project
from postil.pages.site import BuildError, build_site

from .making import project_of

PAGE = {"one.py": '"""One.\n\nBefore.\n\n![Loss over tokens.](/results/made.json)\n\nAfter.\n"""\n'}


def results(**curves: list[list[list[float]]]) -> str:
    contenders = [
        {"name": name, "runs": [{"seed": n, "curve": line} for n, line in enumerate(lines)]}
        for name, lines in curves.items()
    ]
    return json.dumps({"unit": "bits per character", "contenders": contenders})


MADE = results(
    slow=[[[0, 0.1, 4.0], [500, 1.0, 3.0], [1000, 2.0, 2.0]]], fast=[[[0, 0.1, 4.0], [1000, 1.0, 1.0]]] * 2
)


def page_of(folder: Path) -> str:
    return (folder / "site/one.html").read_text()


def test_no_result_is_no_figure_and_a_result_is_one(tmp_path):
    project = project_of(tmp_path, PAGE)
    built = build_site(project, tmp_path / "site")
    (warning,) = built.warnings
    assert str(warning) == "pkg/one.py:5: warning: no figure, as '/results/made.json' is not there yet"
    assert "<svg" not in page_of(tmp_path) and "<p></p>" not in page_of(tmp_path)
    assert "<p>Before.</p>\n<p>After.</p>" in page_of(tmp_path)
    # A later build sees the file, though the page itself is the same.
    (tmp_path / "results").mkdir()
    (tmp_path / "results/made.json").write_text(MADE)
    assert build_site(open_project(tmp_path / "pkg"), tmp_path / "site").written == 1
    page = page_of(tmp_path)
    assert page.count("<polyline") == 3 and '<span class="caption">Loss over tokens.</span>' in page
    assert 'aria-label="Loss over tokens. slow 2; fast 1"' in page
    assert build_site(open_project(tmp_path / "pkg"), tmp_path / "site").written == 0
    (tmp_path / "results/made.json").write_text(MADE.replace("4.0", "5.0"))
    assert build_site(open_project(tmp_path / "pkg"), tmp_path / "site").written == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"contenders": [{"name": "a"}]}', '{"contenders": []}',
             results(a=[[[0, 1], [1, float("nan")]]]), results(a=[[[0, 1]]]), '{"contenders": [{"name": "a", "runs": [{"curve": [[], []]}]}]}'],
)  # fmt: skip
def test_what_holds_no_curves_is_an_error(tmp_path, text):
    with pytest.raises(FigureError):
        read_curves(text)
    project = project_of(tmp_path, PAGE)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/made.json").write_text(text)
    with pytest.raises(BuildError, match=r"pkg/one\.py:5: the picture '/results/made\.json'"):
        build_site(project, tmp_path / "site")


def test_rows_of_one_name_are_lines_of_one_colour():
    rows = [
        {"name": name, "curve": [[x, 0.5], [x + 9, y]]} for name in "ab" for x, y in ((0, 0.9), (10, 0.8))
    ]
    text = json.dumps({"rows": rows})
    assert read_curves(text)["a"] == [[(0.0, 0.5), (9.0, 0.9)], [(10.0, 0.5), (19.0, 0.8)]]
    drawn = curve_figure(text, "Right.")
    assert drawn.count("<polyline") == 4 and drawn.count('<g class="') == 2
    assert 'aria-label="Right. a 0.8; b 0.8"' in drawn, "the last line says where a name has come to"


def test_rows_with_a_curve_are_read_too():
    text = '{"rows": [{"name": "a", "curve": [[100, 3.0], [200, 2.0]]}, {"what": "a ratio", "ratio": 2}]}'
    assert read_curves(text) == {"a": [[(100.0, 3.0), (200.0, 2.0)]]}


def test_points_names_and_numbers():
    series = read_curves(MADE)
    assert series["slow"] == [[(0.0, 4.0), (500.0, 3.0), (1000.0, 2.0)]] and len(series["fast"]) == 2
    drawn = curve_figure(MADE, "x")
    paths = re.findall(r'points="([^"]*)"', drawn)
    # The greatest value is at the top of the frame, the least at its foot, the last token at its right end.
    assert paths[0].split()[0] == "42,8.0" and paths[1].split()[-1] == "354,196.0"
    assert ">1k</text>" in drawn and ">4</text>" in drawn


def test_a_long_curve_is_thinned_and_ends_where_it_ends():
    line = [[float(n), 1.0 / (n + 1)] for n in range(10_000)]
    drawn = curve_figure(results(a=[line]), "x")
    (path,) = re.findall(r'points="([^"]*)"', drawn)
    assert 50 < len(path.split()) <= 130 and path.split()[-1].startswith("354,")


def test_names_of_lines_that_end_together_do_not_overlap():
    drawn = curve_figure(results(**{name: [[[0, 4], [9, 1]]] for name in "abcdef"}), "x")
    places = [int(y) for y in re.findall(r'<text x="362" y="(\d+)"', drawn)]
    assert len(places) == 6 and min(b - a for a, b in pairwise(sorted(places))) >= 13
    assert max(places) <= 216
    # Told apart without colour: every line but the first has dashes of its own.
    assert len(set(re.findall(r'stroke-dasharray="([^"]*)"', drawn))) == 5


def test_names_are_text():
    drawn = curve_figure(results(**{"<script>": [[[0, 4], [9, 1]]]}), '"<b>')
    assert "<script" not in drawn and "<b>" not in drawn and "&lt;script&gt;" in drawn

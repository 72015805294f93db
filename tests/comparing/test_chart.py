"""Curves: the mean of the seeds in their band, with names that can be read in any surroundings."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from postil.comparing.chart import _Axis, chart, chart_file
from postil.leaflet import DARK, HUES, LIGHT

SEEDS = {"a": [[(0, 3.0), (100, 2.0)], [(0, 4.0), (100, 3.0)]], "b <b>": [[(0, 3.5), (100, 1.0)]]}


def points(element: ET.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in element.attrib["points"].split()]


def test_a_line_is_the_mean_in_the_band_of_its_seeds():
    drawn = ET.fromstring(chart(SEEDS, "tokens", "bits"))
    lines = drawn.find("svg")
    assert lines is not None
    (band,), (mean, other) = lines.findall("polygon"), lines.findall("polyline")
    low, high = points(band)[:2], points(band)[:1:-1]
    for (x, y), (_, down), (_, up) in zip(points(mean), low, high, strict=True):
        assert up < y < down and y == pytest.approx((up + down) / 2, abs=0.1)
        assert 0 <= x <= 600
    # All lines share one scale: 3.5, the first of the other curve, is the mean of 3 and 4.
    assert points(other)[0] == points(mean)[0] and points(other)[1][1] > points(mean)[1][1]
    assert other.attrib.get("stroke-dasharray") and "stroke-dasharray" not in mean.attrib


def test_names_do_not_lie_over_one_another():
    curves = {f"model {n}": [[(0, 3.0), (100, 2.0 + n / 1000)]] for n in range(7)}
    drawn = ET.fromstring(chart(curves, "tokens", "bits", height=380))
    names = [text for text in drawn.findall("text") if (text.text or "").startswith("model")]
    places = sorted(float(text.attrib["y"]) for text in names)
    assert len(places) == 7 and all(b - a >= 14 for a, b in pairwise(places))
    assert places[0] > 0 and places[-1] <= 380 - 40
    assert all(float(text.attrib["x"]) + 7 * len(text.text or "") <= 600 for text in names)


@pytest.mark.parametrize("low, high", [(0.0, 1e6), (1.83, 3.31), (2.0, 2.0001), (-3, 5), (0, 1.0)])
def test_ticks_are_few_round_numbers(low, high):
    ticks = _Axis([low, high], 0, 100).ticks()
    assert 4 <= len(ticks) <= 10
    assert low - 1e-9 <= ticks[0] and ticks[-1] <= high + 1e-9
    step = ticks[1] - ticks[0]
    assert f"{step:.0e}"[0] in "125" and step == pytest.approx(float(f"{step:.0e}"))


def test_a_file_brings_both_sets_of_colours():
    text = chart_file(SEEDS, "tokens", "bits")
    ET.fromstring(text)
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    for side, (part, colours) in enumerate(((light, LIGHT), (dark.split("</style>")[0], DARK))):
        for colour in (colours["page"], colours["muted"], *(pair[side] for pair in HUES)):
            assert colour in part
    assert "var(" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "b &lt;b&gt;" in text and text == chart_file(SEEDS, "tokens", "bits")


def test_a_long_comparison_is_a_small_file():
    line = [(1e4 * n, 4.0 - n / 100) for n in range(40)]
    text = chart_file({f"multi-head-attention-{n}": [line] * 3 for n in range(7)}, "tokens", "bits")
    assert len(text.encode()) < 40_000
    assert not re.search(r"\d\.\d{3}", text.split("</style>")[1])

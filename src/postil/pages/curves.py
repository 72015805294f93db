r"""Curves: what training runs have left behind, as a figure of a page.

A page shows results as it shows a picture, `![Loss over tokens.](/results/comparison.json)`: its words become
the caption, the numbers a drawing. While the file is missing there is no figure, so a page may name runs
that somebody has yet to make.

A curve is a list of points; the first number of a point is where it stands, the last one its value. A file of
results has one curve for each run of each contender, or rows with one each; rows of one name belong together:

    {"contenders": [{"name": "aft", "runs": [{"curve": [[1000, 2.5, 3.1], [2000, 5.1, 2.6]]}]}]}
    {"rows": [{"name": "aft", "curve": [[1000, 3.1], [2000, 2.6]]}]}
"""

from __future__ import annotations

import html
import json
import math
from typing import Any

from postil.pages.figures import FigureError

__all__ = ["curve_figure", "read_curves"]

Line = list[tuple[float, float]]


def read_curves(text: str) -> dict[str, list[Line]]:
    r"""Take the learning curves out of a file of results: for each name, one line a run.

    Raises:
        FigureError: it is not such a file, or holds no curve.
    """
    try:
        document = json.loads(text)
        rows = document["contenders"] if "contenders" in document else document["rows"]
        found: dict[str, list[Line]] = {}
        for row in rows:
            if "runs" in row or "curve" in row:
                found.setdefault(str(row["name"]), []).extend(
                    [(float(point[0]), float(point[-1])) for point in run["curve"]]
                    for run in row.get("runs", [row])
                    if len(run["curve"]) > 1
                )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise FigureError(f"is no file of results with learning curves: {error!r}") from error
    numbers = [number for lines in found.values() for line in lines for point in line for number in point]
    if not numbers or not all(map(math.isfinite, numbers)):
        raise FigureError("holds no learning curve, or one that is not finite")
    return {name: lines for name, lines in found.items() if lines}


# The colours are those of code: measured against both grounds already. A line is told from the others by its
# dashes and by the name at its end too.
_KINDS = ("b", "k", "d", "p", "c", "s")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 3")
_LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH, _HEIGHT = 42, 354, 8, 196, 500, 216
_POINTS = 120


def curve_figure(text: str, caption: str) -> str:
    r"""Draw a file of results, each contender's name at the end of its lines.

    Raises:
        FigureError: see `read_curves`.
    """
    series = read_curves(text)
    points = [point for lines in series.values() for line in lines for point in line]
    (left, right), (low, high) = (_span([point[axis] for point in points]) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - left) / (right - left), (y - low) / (high - low)
        return _LEFT + across * (_RIGHT - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)

    drawn = [f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>']
    for share in (0, 0.5, 1):
        x, y = left + share * (right - left), low + share * (high - low)
        (at_x, at_y), top = place(x, y), "start" if not share else "middle"
        drawn.append(f'<text x="{_LEFT - 5}" y="{at_y + 4:.0f}" text-anchor="end">{y:.3g}</text>')
        drawn.append(f'<text x="{at_x:.0f}" y="{_HEIGHT - 4}" text-anchor="{top}">{_short(x)}</text>')
    ends = {name: place(*lines[-1][-1])[1] for name, lines in series.items()}
    for number, (name, lines) in enumerate(series.items()):
        paths = "".join(f'<polyline points="{_path(line, place)}"/>' for line in lines)
        dashes = f' stroke-dasharray="{_DASHES[number % 7]}"' if number % 7 else ""
        drawn.append(f'<g class="{_KINDS[number % 6]}"{dashes}>{paths}')
        drawn.append(
            f'<text x="{_RIGHT + 8}" y="{_apart(ends)[name] + 4:.0f}">{html.escape(name)}</text></g>'
        )
    said = "; ".join(f"{name} {lines[-1][-1][1]:.3g}" for name, lines in series.items())
    label = html.escape(f"{caption} {said}")
    return (
        f'<span class="figure"><svg class="curves" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{label}">{"".join(drawn)}</svg>'
        f'<span class="caption">{html.escape(caption)}</span></span>'
    )


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


# A screen shows no more than some hundred points of a line. The last one is always kept.
def _path(line: Line, place: Any) -> str:
    step = -(-len(line) // _POINTS)
    kept = [*line[:-1:step], line[-1]]
    return " ".join("{:.0f},{:.1f}".format(*place(*point)) for point in kept)


# Names of lines that end close together are moved apart, from the top down.
def _apart(ends: dict[str, float]) -> dict[str, float]:
    placed: dict[str, float] = {}
    least = -math.inf
    for name, y in sorted(ends.items(), key=lambda end: end[1]):
        placed[name] = least = max(y, least + 14)
    over = max(0.0, least - _BOTTOM)
    return {name: y - over for name, y in placed.items()}


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"

r"""Learning curves as SVG, for the page of a report and for a file of its own.

One line for each model, the mean over its seeds, in a band from the lowest of them to the highest: where two
bands lie over one another, the seeds decide which model is better. Names stand at the right in the order in
which the lines end, so that nobody has to search a legend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from statistics import fmean

from postil.leaflet import DARK, HUES, LIGHT

__all__ = ["STYLE", "Curve", "chart", "chart_file"]

# A curve is given by its runs, one a seed.
Line = list[tuple[float, float]]
Curve = list[Line]

# Beside its hue each line has a dash pattern, so that no reader depends on colour, and a black-and-white
# print can still be read.
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "10 2 2 2 2 2")
_LETTER, _LINE, _KEY, _LEFT, _TOP, _BOTTOM = 7.2, 16, 26, 44, 30, 44
# The first part of a curve falls steeply and is much the same for all models. If it set the scale, the part
# where they differ would be a line. So it may leave the picture at the top.
_STEEP = 0.12


def chart(curves: dict[str, Curve], x_label: str, y_label: str, width: int = 600, height: int = 380) -> str:
    r"""Draw named curves as an SVG element; the colours come from the document around it."""
    points = [point for curve in curves.values() for run in curve for point in run]
    right = width - 20 - _KEY - _LETTER * max(map(len, curves), default=0)
    across = _Axis([x for x, _ in points], _LEFT, right)
    upwards = _Axis([y for x, y in points if x >= across.low + _STEEP * across.span], height - _BOTTOM, _TOP)
    parts = [*_frame(across, upwards, height, right)]
    parts.append(f'<text x="{right:.0f}" y="{height - 6}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text x="0" y="14">{escape(y_label)}</text>')
    ends: list[tuple[float, int, str]] = []
    window = f'x="0" y="{_TOP}" width="{width}" height="{height - _TOP}"'
    parts.append(f'<svg {window} viewBox="0 {_TOP} {width} {height - _TOP}">')
    for number, (name, curve) in enumerate(curves.items()):
        mean, low, high = _summary(curve)
        mean, low, high = ([(across.at(x), upwards.at(y)) for x, y in line] for line in (mean, low, high))
        parts += _line(mean, low, high, number, several=len(curve) > 1)
        if mean:
            ends.append((mean[-1][1], number, name))
    parts.append("</svg>")
    for y, number, name in _spread(ends, height - _BOTTOM):
        parts.append(_polyline([(right + 8, y), (right + 8 + _KEY, y)], number))
        text = f'<text class="s{number % len(HUES)}" x="{right + 14 + _KEY:.1f}" y="{y + 4:.1f}">'
        parts.append(f"{text}{escape(name)}</text>")
    label = escape(f"{y_label} over {x_label}: {', '.join(curves)}")
    box = f'viewBox="0 0 {width} {height}" role="img" aria-label="{label}"'
    return f"<svg {box}>{''.join(parts)}</svg>"


# A picture in somebody's page has no document to take colours from. It brings both sets, and a ground of its
# own: with a transparent one, a reader whose page is dark and whose system is light would see black on black.
def chart_file(curves: dict[str, Curve], x_label: str, y_label: str) -> str:
    r"""Draw named curves as an SVG file that is readable in light and in dark surroundings."""
    picture = chart(curves, x_label, y_label, 820, 420)
    head, _, rest = picture.partition(">")
    head = head.replace(
        'viewBox="0 0 820 420"', 'xmlns="http://www.w3.org/2000/svg" viewBox="-16 -10 852 440"'
    )
    ground = '<rect class="ground" x="-16" y="-10" width="852" height="440" rx="8"/>'
    light = _rules(LIGHT, [light for light, _ in HUES])
    dark = f"@media (prefers-color-scheme: dark) {{ {_rules(DARK, [dark for _, dark in HUES])}}}"
    font = "text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif; } "
    return f"{head}><style>{font}{light}{dark}</style>{ground}{rest}\n"


def _rules(colours: dict[str, str], hues: list[str]) -> str:
    fixed = (
        f".ground {{ fill: {colours['page']}; }} .grid {{ stroke: {colours['line']}; }} "
        f"text {{ font-size: 13px; fill: {colours['muted']}; }} "
        "polyline { fill: none; stroke-width: 2; } polygon { opacity: .16; } "
    )
    own = (
        f"polyline.s{n} {{ stroke: {hue}; }} text.s{n}, polygon.s{n} {{ fill: {hue}; }} "
        for n, hue in enumerate(hues)
    )
    return fixed + "".join(own)


# In a leaflet the colours have names.
STYLE = _rules({name: f"var(--{name})" for name in LIGHT}, [f"var(--series{n})" for n in range(len(HUES))])


# ## Axes
class _Axis:
    def __init__(self, values: list[float], start: float, end: float):
        self.low, self.high = min(values, default=0.0), max(values, default=1.0)
        # A single value, or none, still needs an axis of some length.
        if self.high == self.low:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self.span = self.high - self.low
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / self.span * (self.end - self.start)

    # Round numbers: 1, 2 or 5 times a power of ten apart, four to nine of them.
    def ticks(self) -> list[float]:
        step = 10 ** math.floor(math.log10(self.span / 4))
        step *= next(factor for factor in (5, 2, 1) if step * factor <= self.span / 4)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _frame(across: _Axis, upwards: _Axis, height: int, right: float) -> Iterator[str]:
    for tick in upwards.ticks():
        y = upwards.at(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
    for tick in across.ticks():
        yield f'<text x="{across.at(tick):.1f}" y="{height - 24}" text-anchor="middle">{_short(tick)}</text>'


def _short(x: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.4g}{letter}"
    return f"{x:.4g}"


# ## Lines
#
# Runs of one model are evaluated after the same updates, so their points belong together by number. A budget
# of time ends them at different updates: the mean goes as far as all of them do.
def _summary(curve: Curve) -> tuple[Line, Line, Line]:
    together = list(zip(*curve, strict=False))
    mean = [(fmean(x for x, _ in points), fmean(y for _, y in points)) for points in together]
    low, high = (
        [(x, extreme(y for _, y in points)) for (x, _), points in zip(mean, together, strict=True)]
        for extreme in (min, max)
    )
    return mean, low, high


def _line(mean: Line, low: Line, high: Line, number: int, *, several: bool) -> Iterator[str]:
    if several:
        yield f'<polygon class="s{number % len(HUES)}" points="{_points([*low, *reversed(high)])}"/>'
    yield _polyline(mean, number)


def _polyline(line: Line, number: int) -> str:
    dash = _DASHES[number % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline class="s{number % len(HUES)}" points="{_points(line)}"{dashed}/>'


def _points(line: Line) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in line)


# Curves end close together, and names need a line of text each. Going down, each name moves below the one
# before; then, from the lowest place up, what was pushed out of the picture moves back.
def _spread(ends: list[tuple[float, int, str]], bottom: float) -> list[tuple[float, int, str]]:
    ends = sorted(ends)
    places: list[float] = []
    for y, _, _ in ends:
        places.append(max(y, places[-1] + _LINE) if places else y)
    limit = bottom
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - _LINE
    return [(y, number, name) for y, (_, number, name) in zip(places, ends, strict=True)]

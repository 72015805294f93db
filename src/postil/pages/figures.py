r"""Figures: drawings that become part of the page.

An SVG inside the page takes the page's colours, so it is right in light and dark, and needs no request. It is
also markup from a file, so only the elements and attributes that draw are let through.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

__all__ = ["FigureError", "bars", "heat_map", "inline_svg", "line_plot", "plots_html"]

_SVG = "{http://www.w3.org/2000/svg}"
_ELEMENTS = frozenset(
    [
        "svg",
        "g",
        "path",
        "rect",
        "circle",
        "ellipse",
        "line",
        "polyline",
        "polygon",
        "text",
        "tspan",
        "defs",
        "marker",
        "clipPath",
        "title",
        "desc",
        "use",
        "linearGradient",
        "radialGradient",
        "stop",
        "symbol",
    ]
)
_ATTRIBUTES = frozenset(
    [
        "id",
        "class",
        "d",
        "x",
        "y",
        "x1",
        "y1",
        "x2",
        "y2",
        "cx",
        "cy",
        "r",
        "rx",
        "ry",
        "dx",
        "dy",
        "width",
        "height",
        "viewBox",
        "points",
        "transform",
        "fill",
        "stroke",
        "fill-opacity",
        "stroke-opacity",
        "opacity",
        "stroke-width",
        "stroke-linecap",
        "stroke-linejoin",
        "stroke-dasharray",
        "stroke-dashoffset",
        "stroke-miterlimit",
        "fill-rule",
        "clip-rule",
        "clip-path",
        "clipPathUnits",
        "marker-start",
        "marker-mid",
        "marker-end",
        "markerWidth",
        "markerHeight",
        "markerUnits",
        "refX",
        "refY",
        "orient",
        "font-size",
        "font-family",
        "font-weight",
        "font-style",
        "text-anchor",
        "dominant-baseline",
        "preserveAspectRatio",
        "offset",
        "stop-color",
        "gradientUnits",
        "gradientTransform",
        "letter-spacing",
    ]
)


class FigureError(ValueError):
    r"""A drawing that cannot be shown."""


def inline_svg(text: str, label: str, prefix: str) -> str:
    r"""Make a drawing fit to stand in a page: only what draws, ids of its own, black and white as the page's.

    Raises:
        FigureError: it is not SVG, or declares entities.
    """
    if "<!ENTITY" in text:
        raise FigureError("declares entities")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise FigureError(f"is not XML: {error}") from error
    if root.tag != f"{_SVG}svg":
        raise FigureError("is not an SVG drawing")
    if "viewBox" not in root.attrib and "width" in root.attrib and "height" in root.attrib:
        sizes = [re.sub(r"[^\d.]", "", root.attrib[k]) for k in ("width", "height")]
        root.attrib["viewBox"] = f"0 0 {sizes[0]} {sizes[1]}"
    root.attrib.pop("width", None)
    root.attrib.pop("height", None)
    # Alone, a drawing says in one language what it is. In a page the label says it in the page's.
    for told in [child for child in root if child.tag in (f"{_SVG}title", f"{_SVG}desc")]:
        root.remove(told)
    body = _element(root, prefix)
    return body.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _element(node: ElementTree.Element, prefix: str) -> str:
    name = node.tag.removeprefix(_SVG) if isinstance(node.tag, str) else ""
    if name not in _ELEMENTS:
        return ""
    attributes = "".join(f' {k}="{html.escape(v)}"' for k, v in _attributes(node, prefix))
    inner = html.escape((node.text or "") if name in ("text", "tspan", "title", "desc") else "", False)
    for child in node:
        inner += _element(child, prefix)
        inner += html.escape((child.tail or "") if name in ("text", "tspan") else "", False)
    return f"<{name}{attributes}>{inner}</{name}>"


# Style attributes are forbidden by the page's security policy; each rule is an attribute of the same name.
def _attributes(node: ElementTree.Element, prefix: str) -> list[tuple[str, str]]:
    rules = [rule.split(":", 1) for rule in node.attrib.get("style", "").split(";") if ":" in rule]
    found = {**node.attrib, **{name.strip(): value.strip() for name, value in rules}}
    result = []
    for name, value in found.items():
        local = name.rpartition("}")[2]
        if local == "href" and value.startswith("#") and node.tag == f"{_SVG}use":
            result.append(("href", f"#{prefix}-{value[1:]}"))
            continue
        if name not in _ATTRIBUTES or re.search(r"url\((?!#)", value):
            continue
        if name == "id":
            value = f"{prefix}-{value}"
        value = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", value)
        if name in ("fill", "stroke") and value.lower() in ("#000000", "#000", "black"):
            value = "currentColor"
        if name in ("fill", "stroke") and value.lower() in ("#ffffff", "#fff", "white"):
            value = "none"
        result.append((name, value))
    return result


# Eight steps are as many as an eye tells apart in one colour. Cells of a step share one path, so a heat map
# of a thousand cells is nine nodes of the page. A shade has no sign, so negative numbers are small squares.
def heat_map(values: list[list[float]], label: str) -> str:
    r"""A matrix as a drawing: rows downwards, columns to the right, darker for larger."""
    low, high = _range([value for row in values for value in row])
    least = 0.0 if low < 0 else low
    span = max(high - least, -low, 0.0)
    paths: dict[tuple[bool, int], list[str]] = {}
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            step = round(7 * abs(value - least) / span) if span else 0
            if step:
                cell = f"M{x}.3 {y}.3h.4v.4h-.4z" if value < 0 else f"M{x} {y}h1v1h-1z"
                paths.setdefault((value < 0, step), []).append(cell)
    drawn = "".join(
        f'<path d="{"".join(path)}" fill="currentColor" fill-opacity="{step / 7:.2f}"/>'
        for (_, step), path in sorted(paths.items())
    )
    width, height = max(map(len, values), default=1), len(values)
    edge = f"{max(width, height) * 0.005:.2g}"
    frame = (
        f'<rect width="{width}" height="{height}" fill="none" stroke="currentColor" stroke-width="{edge}"/>'
    )
    name = html.escape(f"{label}: {height} × {width}, {low:.3g} – {high:.3g}")
    box = f"-0.1 -0.1 {width + 0.2:g} {height + 0.2:g}"
    return f'<svg class="heat" viewBox="{box}" role="img" aria-label="{name}">{drawn}{frame}</svg>'


def line_plot(values: list[float], label: str) -> str:
    r"""A sequence of numbers as a line, from its least to its greatest."""
    low, high = _range(values)
    span = (high - low) or 1.0
    step = 300 / max(len(values) - 1, 1)
    points = " ".join(f"{i * step:.1f},{100 - 96 * (v - low) / span:.1f}" for i, v in enumerate(values))
    name = html.escape(f"{label}: {low:.3g} – {high:.3g}")
    return (
        f'<svg class="line" viewBox="-4 0 308 106" role="img" aria-label="{name}">'
        '<path d="M0 102H300" stroke="currentColor" stroke-opacity=".35"/>'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.6"/></svg>'
    )


def bars(values: dict[str, float], label: str) -> str:
    r"""Named numbers as bars, each with its name and its value."""
    high = max(*values.values(), 0.0) or 1.0
    lines = []
    for i, (name, value) in enumerate(values.items()):
        y, length = 24 * i, 110 * max(value, 0.0) / high
        lines.append(
            f'<text x="54" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="60" y="{y + 3}" width="{length:.1f}" height="16" fill="currentColor"/>'
            f'<text x="{65 + length:.1f}" y="{y + 15}">{_short(value)}</text>'
        )
    name = html.escape(label + ": " + ", ".join(f"{name} {_short(value)}" for name, value in values.items()))
    return (
        f'<svg class="bars" viewBox="0 0 224 {24 * len(values)}" role="img" aria-label="{name}">'
        f"{''.join(lines)}</svg>"
    )


def _range(values: list[float]) -> tuple[float, float]:
    return min(values, default=0.0), max(values, default=0.0)


def plots_html(plots: dict[str, Any], translate: Callable[[str], str | None]) -> str:
    r"""What an example drew: each plot with its name and the range of its values below."""
    figures = []
    for label, values in plots.items():
        words = translate(label) or label
        if isinstance(values, dict):
            drawing, scale = bars(values, words), ""
        elif isinstance(values[0], list):
            drawing, scale = heat_map(values, words), _scale(*_range([v for row in values for v in row]))
        else:
            low, high = _range(values)
            drawing, scale = line_plot(values, words), f"{_short(low)} … {_short(high)}"
        scale = f"<span>{scale}</span>" if scale else ""
        figures.append(f"<figure>{drawing}<figcaption>{html.escape(words)}{scale}</figcaption></figure>")
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def _scale(low: float, high: float) -> str:
    marks = [("▪", low)] if low < 0 else []
    marks += [("□", 0.0 if low < 0 else low), ("■", high)]
    return " ".join(f"{mark} {_short(value)}" for mark, value in marks)


def _short(value: float) -> str:
    return f"{value:.2g}".replace("-", "−")

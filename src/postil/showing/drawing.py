r"""The pictures as figures: one file for each kind, layers downwards, heads or channels across."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from postil.showing.weights import Picture

__all__ = ["draw", "grouped"]

ACROSS = 8
TICKS = 48


def grouped(pictures: list[Picture]) -> dict[str, dict[int, list[Picture]]]:
    r"""Sort pictures by kind and layer, each in the order they come."""
    groups: dict[str, dict[int, list[Picture]]] = {}
    for picture in pictures:
        groups.setdefault(picture.kind, {}).setdefault(picture.layer, []).append(picture)
    return groups


def draw(pictures: list[Picture], tokens: list[str], folder: Path) -> list[Path]:
    r"""Draw one SVG and one PNG for each kind of picture into `folder`; give their paths.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to get it.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'postil[plot]'") from error
    paths = []
    for kind, layers in grouped(pictures).items():
        across = min(ACROSS, max(map(len, layers.values())))
        size = 3.2 if across > 1 else 6.0
        figure = Figure(figsize=(size * across, size * len(layers)), layout="constrained")
        grid = figure.subplots(len(layers), across, squeeze=False)
        for line, (layer, row) in zip(grid, layers.items(), strict=True):
            for axes in line[len(row) :]:
                axes.set_axis_off()
            for axes, picture in zip(line, row, strict=False):
                _draw_one(axes, picture, tokens if across == 1 else [])
                axes.set_title(f"layer {layer}, {picture.part}" if layer else picture.part, fontsize=9)
        figure.suptitle(kind)
        name = folder / re.sub(r"[^a-z0-9]+", "-", kind.lower())
        with rc_context({"svg.hashsalt": "postil"}):
            figure.savefig(name.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(name.with_suffix(".png"), dpi=110)
        paths += [name.with_suffix(".svg"), name.with_suffix(".png")]
    return paths


# A bias may be negative, and its zero is a colour of its own; a weight begins at nothing.
def _draw_one(axes: Any, picture: Picture, tokens: list[str]) -> None:
    values = picture.values.float().cpu().numpy()
    if not picture.over_text:
        axes.bar(picture.columns, values[0], color="#0550ae")
        return
    if picture.kind == "position biases":
        bound = max(abs(values).max(), 1e-9)
        axes.imshow(values, cmap="RdBu_r", vmin=-bound, vmax=bound)
    else:
        axes.imshow(values, cmap="Blues", vmin=0)
    if tokens and len(tokens) <= TICKS:
        axes.set_xticks(range(len(tokens)), tokens, fontsize=6)
        axes.set_yticks(range(len(tokens)), tokens, fontsize=6)
    else:
        axes.set_xticks([])
        axes.set_yticks([])

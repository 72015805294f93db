r"""The pictures as figures: one file for each kind, layers downwards, heads or channels across."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from postil.leaflet import HUES, LIGHT
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
        over_text = next(iter(layers.values()))[0].over_text
        size = (5.0, 3.0) if not over_text else (3.2, 3.2) if across > 1 else (6.0, 6.0)
        figure = Figure(figsize=(size[0] * across, size[1] * len(layers)), layout="constrained")
        grid = figure.subplots(len(layers), across, squeeze=False)
        for line, (layer, row) in zip(grid, layers.items(), strict=True):
            for axes in line[len(row) :]:
                axes.set_axis_off()
            for axes, picture in zip(line, row, strict=False):
                _draw_one(axes, picture, tokens if across == 1 else [])
                axes.set_title(f"layer {layer}, {picture.part}" if layer else picture.part, fontsize=9)
                axes.spines[:].set_color(LIGHT["line"])
            if over_text:
                line[0].set_ylabel("reads", fontsize=9, color=LIGHT["muted"])
        if over_text:
            for axes in grid[-1]:
                axes.set_xlabel("is read", fontsize=9, color=LIGHT["muted"])
        figure.suptitle(kind)
        name = folder / re.sub(r"[^a-z0-9]+", "-", kind.lower())
        with rc_context({"svg.hashsalt": "postil"}):
            figure.savefig(name.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(name.with_suffix(".png"), dpi=110)
        paths += [name.with_suffix(".svg"), name.with_suffix(".png")]
    return paths


# A bias may be negative, and its zero is a colour of its own. A weight begins at nothing, and each row has a
# scale of its own: later tokens share their weight among more, and on one scale only the first would be seen.
def _draw_one(axes: Any, picture: Picture, tokens: list[str]) -> None:
    values = picture.values.float().cpu().numpy()
    if not picture.over_text:
        axes.bar(picture.columns, values[0], color=LIGHT["accent"], width=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        return
    bound = abs(values).max() if picture.signed else abs(values).max(axis=1, keepdims=True)
    axes.imshow(values / bound.clip(1e-9), cmap=_colours(), vmin=-1, vmax=1)
    if tokens and len(tokens) <= TICKS:
        axes.set_xticks(range(len(tokens)), tokens, fontsize=6)
        axes.set_yticks(range(len(tokens)), tokens, fontsize=6)
    else:
        axes.set_xticks([])
        axes.set_yticks([])


def _colours() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("postil", [HUES[1][0], LIGHT["page"], LIGHT["accent"]])

r"""The loss curve of a run, drawn from its own `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from postil import durable

__all__ = ["draw_curves", "read_metrics"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    r"""Read the lines of a metrics file; those torn by a crash, or not written by a run, are left out."""
    lines = []
    for line in path.read_bytes().split(b"\n"):
        try:
            values = durable.parse_json(line)
        except ValueError:
            continue
        # JSON has no words for these, so a run writes them as text.
        values = {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in values.items()}
        if isinstance(values.get("kind"), str) and isinstance(values.get("update"), int):
            lines.append(values)
    return lines


def draw_curves(run: Path, unit: str) -> list[Path]:
    r"""Draw training and validation loss over updates as `loss.svg` and `loss.png` into a run's folder.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to get it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the loss curve needs matplotlib: pip install 'postil[plot]'") from error
    metrics = read_metrics(run / "metrics.jsonl")
    train = [(m["update"], m["bits"]) for m in metrics if m["kind"] == "train"]
    valid = [(m["update"], m["bits"]) for m in metrics if m["kind"] == "valid"]
    # A figure of its own, not pyplot's global state: nothing is opened and nothing has to be closed.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if train:
        axes.plot(*zip(*train, strict=True), color="#8c959f", linewidth=1, label="training")
    if valid:
        axes.plot(*zip(*valid, strict=True), color="#0550ae", marker="o", markersize=3, label="validation")
        axes.annotate(
            f"{valid[-1][1]:.3f}", valid[-1], textcoords="offset points", xytext=(4, 4), color="#0550ae"
        )
    axes.set(xlabel="update", ylabel=unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if train or valid:
        axes.legend(frameon=False)
    paths = [run / "loss.svg", run / "loss.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=150)
    return paths

r"""`postil bench`: measure beside other libraries, and show what was measured.

The suites are scripts of the repository, `benchmarks/NAME.py`, and run in the peers' environment, where those
libraries are. This command finds both, runs the one in the other, and shows the file of results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["run"]

REPOSITORY = Path(__file__).parents[3]
SUITES = ("attention", "aft", "feedback", "transformer", "decode", "memory")


def run(argv: list[str]) -> int:
    r"""Run a suite of benchmarks, or show its last results again."""
    parser = argparse.ArgumentParser(
        prog="postil bench", description="Measure beside other libraries (make peers installs them)."
    )
    parser.add_argument("suite", help=f"one of {', '.join(suites())}")
    parser.add_argument("--show", action="store_true", help="measure nothing, show the last results")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few minutes")
    arguments, further = parser.parse_known_args(argv)
    if arguments.suite not in suites():
        raise ValueError(
            f"{arguments.suite!r} is not a suite; there are {', '.join(suites()) or 'none here'}"
        )
    if not arguments.show:
        code = _measure(arguments.suite, [*(["--quick"] if arguments.quick else []), *further])
        if code:
            return code
    found = results(arguments.suite)
    if not found:
        raise ValueError(f"there are no results of {arguments.suite} yet; run it without --show")
    for path in found:
        _show(path)
    return 0


def suites(repository: Path = REPOSITORY) -> list[str]:
    r"""Name the suites of this checkout; an installed package has none."""
    return [name for name in SUITES if (repository / "benchmarks" / f"{name}.py").exists()]


def results(suite: str, repository: Path = REPOSITORY) -> list[Path]:
    r"""Give the files of results that a suite has written."""
    kinds = ("", "-quick", "-cuda", "-quick-cuda")
    found = (repository / "benchmarks/results" / f"{suite}{kind}.json" for kind in kinds)
    return [path for path in found if path.exists()]


# Peers pin versions of their own, and never come into our environment.
def _measure(suite: str, options: list[str]) -> int:
    python = REPOSITORY / ".venv-peers/bin/python"
    if not python.exists():
        raise ValueError("the other libraries are not installed; `make peers` makes their environment")
    script = REPOSITORY / "benchmarks" / f"{suite}.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    return subprocess.run([python, script, *options], env=environment, check=False).returncode


def _show(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    console = Console(highlight=False)
    machine = document["machine"]
    console.print(
        f"[bold]{path.name}[/]  {machine['processor']}, torch {machine['torch']}, {machine['date']}"
    )
    lines = [line for row in document["rows"] for line in ratios(row)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("measured", "sizes", "ratio"):
        table.add_column(name, justify="right" if name == "ratio" else "left")
    for what, sizes, ratio in lines:
        table.add_row(what, sizes, f"{ratio:.2f}")
    console.print(table)
    try:
        console.print(f"drawn in {draw(lines, path.with_suffix('.svg'))}", markup=False)
    except ModuleNotFoundError:
        console.print("a plot needs matplotlib: pip install 'postil[plot]'", style="yellow", markup=False)


SIZES = ("after", "T", "B", "D", "L", "H", "d_ff", "window", "threads")


# Suites write rows of different kinds; what they share is that a ratio is a number, or a table with a median,
# under a name that says of what. Memory is a ratio too: to a tensor of the input's size.
def ratios(row: dict[str, Any]) -> list[tuple[str, str, float]]:
    r"""Find the ratios of a row: what was measured, at which sizes, and the median."""
    given = {**row, **row.get("sizes", {})}
    sizes = " ".join(
        f"{name}={given[name]}" for name in SIZES if name in given and (name, given[name]) != ("threads", 1)
    )
    what = str(row.get("what", ""))
    found: list[tuple[str, str, float]] = []
    if "units_of_TBD" in row:
        found.append((f"{what}: {row['name']}", sizes, float(row["units_of_TBD"])))
    for name, value in row.items():
        if name in ("sizes", "times", "seconds") or not isinstance(value, dict):
            continue
        if isinstance(value.get("median"), int | float):
            found.append((what if name == "ratio" else f"{what}, {name}", sizes, value["median"]))
        elif all(isinstance(each, int | float) for each in value.values()):
            label = name.replace("_", " ")
            found += [(f"{what}, {label}: {other}", sizes, float(each)) for other, each in value.items()]
    return found


# On a logarithmic axis a bar has no natural beginning but 1: there both sides are equal.
def draw(lines: list[tuple[str, str, float]], path: Path) -> Path:
    r"""Draw ratios as bars on a logarithmic axis, so that twice and half are equally far from 1."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 0.28 * len(lines)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{what}  {sizes}" for what, sizes, _ in lines]
    values = [max(ratio, 1e-3) for _, _, ratio in lines]
    bars = axes.barh(range(len(lines)), [value - 1 for value in values], left=1, color="#0550ae")
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4, fontsize=7, color="#57606a")
    axes.set_yticks(range(len(lines)), labels, fontsize=7)
    axes.set(xscale="log", xlabel="ratio", ylim=(len(lines) - 0.4, -0.6))
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.axvline(1.0, color="#1f2328", linewidth=1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    with rc_context({"svg.hashsalt": "postil"}):
        figure.savefig(path, metadata={"Date": None})
    return path

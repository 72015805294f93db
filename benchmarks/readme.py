r"""The table of figures in README.md, read from committed results.

    python benchmarks/readme.py            write the table
    python benchmarks/readme.py --check    say whether it is current

A figure that was typed once is true once. So the lines between the two marks in README.md are made here, each
from the file it names, and a test fails when a result has changed and the table has not.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims import RESULTS, load

__all__ = ["FIGURES", "Figure", "table", "with_table"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- figures: made by benchmarks/readme.py -->", "<!-- end of figures -->"
Row = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    r"""What was measured, the suite whose results hold it, and how it is read from the rows."""

    says: str
    suite: str
    read: Callable[[list[Row]], str]


def _row(rows: list[Row], **fields: Any) -> Row:
    return next(row for row in rows if all(row.get(name) == value for name, value in fields.items()))


def _training(rows: list[Row]) -> str:
    return f"{_row(rows, threads=1)['ratio']['median']:.2f}"


def _writing(rows: list[Row]) -> str:
    row = next(row for row in rows if row["what"].startswith("writing"))
    return f"{row['ratio']['median']:.0f} times faster"


def _aft_speed(rows: list[Row]) -> str:
    slower = _row(rows, what="forward+backward", T=4096, D=256)["times_slower_than_AFTLocal"]
    return f"{slower['labml-nn AFTLocal']:.1f} and {slower['SDPA attention']:.1f} times faster"


def _aft_memory(rows: list[Row]) -> str:
    at = {
        t: _row(rows, what="peak memory, forward+backward", name="AFTLocal", T=t)["units_of_TBD"]
        for t in (4096, 65536)
    }
    return f"{at[4096]:.1f} and {at[65536]:.1f}"


def _feedback_training(rows: list[Row]) -> str:
    ours = _row(rows, what="forward+backward", threads=1, D=256, T=512)["over_parallel_transformer"]
    theirs = _row(rows, what="forward+backward, peers", D=256, T=512)["over_parallel_transformer"]
    return f"{ours['shared']:.2f}; labml-nn's {theirs['labml-nn KV']:.1f}"


def _feedback_decoding(rows: list[Row]) -> str:
    times = _row(rows, what="decoding one token", D=512)["times"]
    return f"{times['parallel transformer, cached']['ratio']['shared']['median']:.1f} times as many"


def _programs(rows: list[Row]) -> str:
    asked = [row for row in rows if (row["statements"], row["variables"]) == (100, 3)]
    right = {row["name"]: row["accuracy"] for row in asked}
    return f"{100 * right['feedback']:.0f} % against {100 * right['multi-head-attention']:.0f} %"


FIGURES = (
    Figure(
        "training pass of the transformer (D=256, H=16, L=6, T=512, B=16), time / that of "
        "`torch.nn.TransformerEncoder`",
        "transformer",
        _training,
    ),
    Figure(
        "writing 1,000 characters with the decoding state, against recomputing every prefix",
        "transformer",
        _writing,
    ),
    Figure(
        "training pass of AFT-local (D=256, T=4,096), against labml-nn's and against SDPA attention",
        "aft",
        _aft_speed,
    ),
    Figure("its peak memory at T = 4,096 and 65,536, in tensors of the input's size", "aft", _aft_memory),
    Figure(
        "training pass of the Feedback Transformer (D=256, L=6, T=512), time / that of a parallel "
        "transformer; labml-nn's",
        "feedback",
        _feedback_training,
    ),
    Figure(
        "tokens it writes a second, against a transformer with cache (D=512)", "feedback", _feedback_decoding
    ),
    Figure(
        "values it says right that programs of 100 statements print, against a parallel transformer trained "
        "alike",
        "algorithmic",
        _programs,
    ),
)


def table(folder: Path = RESULTS) -> str:
    r"""Write the table from the results in a folder and, for its last line, docs/reliability.md."""
    lines = ["| measured here, on two CPU cores | figure | from |", "| --- | --- | --- |"]
    for figure in FIGURES:
        document = load(figure.suite, folder)
        if document is None:
            lines.append(f"| {figure.says} | not measured yet | |")
        else:
            link = f"[results](benchmarks/results/{figure.suite}.json)"
            lines.append(f"| {figure.says} | {figure.read(document['rows'])} | {link} |")
    return "\n".join([*lines, _cases()])


def _cases() -> str:
    reliability = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    held = set(re.findall(r"^\| (BC\d+)", reliability, re.MULTILINE))
    says = "real-world failures of other libraries, each held by a named test"
    return f"| {says} | {len(held)} | [reliability](docs/reliability.md) |"


def with_table(page: str, folder: Path = RESULTS) -> str:
    r"""Put the table between the marks of a page.

    Raises:
        ValueError: the page does not hold the two marks.
    """
    pattern = re.escape(BEGIN) + r".*?" + re.escape(END)
    if not re.search(pattern, page, re.DOTALL):
        raise ValueError(f"{PAGE.name} has lost its marks {BEGIN} and {END}")
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{table(folder)}\n\n{END}", page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is not current")
    chosen = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    made = with_table(page)
    if chosen.check:
        print("README.md is current" if made == page else "README.md is stale: run benchmarks/readme.py")
        return int(made != page)
    PAGE.write_text(made, encoding="utf-8")
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())

r"""The papers' claims beside what was measured here, as `docs/claims.md`.

    python benchmarks/claims.py            write the table
    python benchmarks/claims.py --check    say whether it is current

Nothing in the table is typed: each figure of ours is read from a committed file in `benchmarks/results`, with
the command that made it and the machine it ran on. A claim whose file is not there yet says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["CLAIMS", "Claim", "load", "table"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/claims.md"
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    r"""One claim: the paper's key, what it says, its figure, and how ours is read from a suite's rows.

    `suite` names a file of results; the full one is taken before the quick one. `run` is how to make it.
    """

    paper: str
    says: str
    published: str
    suite: str
    run: str
    ours: Callable[[Rows], str]


def load(suite: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    r"""Read the results of a suite, those of all sizes if they are there; `None` if there are none."""
    for name in (suite, f"{suite}-quick"):
        path = folder / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
    return None


# ## Reading figures from rows
def _some(rows: Rows, **fields: Any) -> Rows:
    return [row for row in rows if all(row.get(name) == value for name, value in fields.items())]


def _listed(parts: list[str]) -> str:
    return "; ".join(parts) or "not measured"


def _memory_in_units(rows: Rows) -> str:
    found = _some(rows, what="peak memory, forward+backward", name="AFTLocal")
    return _listed([f"{row['units_of_TBD']:g} at T = {row['T']:,}" for row in found])


def _over_linear_layers(rows: Rows) -> str:
    found = _some(rows, what="forward+backward", D=256)
    return _listed([f"{row['over_linear_layers']['median']:.2f} at T = {row['T']:,}" for row in found])


def _attention_slower(rows: Rows) -> str:
    name = "SDPA attention"
    trained = _some(rows, what="forward+backward", D=256)
    found = [row for row in trained if name in row["times_slower_than_AFTLocal"]]
    return _listed([f"{r['times_slower_than_AFTLocal'][name]:.2f} at T = {r['T']:,}" for r in found])


def _decoding_grows(rows: Rows) -> str:
    found = _some(rows, what="decoding one token")
    parts = []
    for name in ("AFTLocal", "attention, cached"):
        times = [(row["after"], row["times"][name]["median"]) for row in found if name in row["times"]]
        if len(times) > 1:
            (first, one), (last, other) = times[0], times[-1]
            parts.append(f"{name}: {other / one:.2f} times as long after {last:,} tokens as after {first}")
    return _listed(parts)


def _recurrence_costs(rows: Rows) -> str:
    found = _some(rows, what="forward+backward", threads=1)
    over = [row["over_parallel_transformer"]["shared"] for row in found]
    sizes = [f"D = {row['D']}, L = {row['L']}, T = {row['T']}" for row in found]
    return _listed([f"{ratio:.2f} at {size}" for ratio, size in zip(over, sizes, strict=True)])


def _feedback_decodes(rows: Rows) -> str:
    name = "parallel transformer, cached"
    found = [row for row in _some(rows, what="decoding one token") if name in row["times"]]
    return _listed(
        [
            f"{row['times'][name]['ratio']['shared']['median']:.2f} at D = {row['D']}, L = {row['L']} after "
            f"{row['after']} tokens"
            for row in found
        ]
    )


# The stages of a model follow each other, so its last row says how much it has read.
def _accuracies(rows: Rows) -> str:
    def one(name: str) -> str:
        stages = [row for row in rows if row["name"] == name]
        each = [
            f"{100 * row['accuracy']:.1f} % (variables {row['variables']}, statements {row['statements']})"
            for row in stages
        ]
        last = stages[-1]
        price = f"{last['programs']:,} programs and {last['cpu_seconds'] / 60:.0f} minutes of one core"
        return f"{name} of {last['sizes']['L']} layers {', '.join(each)}, after {price}"

    return _listed([one(name) for name in dict.fromkeys(row["name"] for row in rows)])


def _attention_grows(rows: Rows) -> str:
    found = _some(rows, what="forward+backward", D=256)
    each = [(row["T"], row["times"]["MultiHeadAttention"]["median"] / (row["T"] * row["B"])) for row in found]
    return _listed([f"{time / each[0][1]:.2f} at T = {t:,}" for t, time in each])


def _on_pictures(rows: Rows) -> str:
    return _listed([f"{row['name']} {row['bits_per_dimension']:.3f}" for row in rows])


# ### Of a comparison, whose rows are models
def _of(family: str, rows: Rows) -> Rows:
    return [row for row in rows if row["mixer"].startswith(("multi-head-attention", family))]


def _bits(family: str, rows: Rows) -> str:
    def one(row: dict[str, Any]) -> str:
        deviation = row["bits"]["deviation"]
        spread = "" if deviation is None else f" ± {deviation:.3f}"
        return f"{row['name']} {row['bits']['mean']:.3f}{spread} ({row['parameters']:,} parameters)"

    return _listed([one(row) for row in _of(family, rows)])


def _states(family: str, rows: Rows) -> str:
    return _listed([f"{row['name']} {row['state_bytes'] / 1e3:,.1f} kB" for row in _of(family, rows)])


# ## The claims
#
# Where no figure of the paper is comparable, none is quoted: other machines and other sizes say nothing about
# a ratio measured here.
COMPARE = (
    "postil compare multi-head-attention aft-full aft-simple aft-local aft-conv feedback feedback-original "
    "--experiment demo --seeds 1,2,3 --max-tokens 1000000 --threads 1 --evaluate_every 100 "
    "--model.activation relu --optimizer.batch_size 8 --optimizer.lr 1e-3"
)
TRANSFORMER, AFT, FEEDBACK = "vaswani2017", "zhai2021", "fan2020"
CLAIMS = (
    Claim(
        TRANSFORMER,
        "A layer of self-attention takes time that is quadratic in the length, most of it linear layers in "
        "short texts: a position's time, training, over that in the shortest text",
        "O(n^2 d), Table 1",
        "attention",
        "postil bench attention --full",
        _attention_grows,
    ),
    Claim(
        AFT,
        "Memory is linear in the length of the text: so many tensors of the input's size, at any length",
        "O(T D), Table 1",
        "aft",
        "postil bench aft --full",
        _memory_in_units,
    ),
    Claim(
        AFT,
        "AFT-local's time is linear in the length: the module over its four linear layers alone",
        "O(T s D), Table 1",
        "aft",
        "postil bench aft --full",
        _over_linear_layers,
    ),
    Claim(
        AFT,
        "Attention's time is quadratic: attention over AFT-local, training",
        "O(T^2 D), Table 1",
        "aft",
        "postil bench aft --full",
        _attention_slower,
    ),
    Claim(
        AFT,
        "A token costs the same after any text: AFT-local needs a state of fixed size",
        "not quoted",
        "aft",
        "postil bench aft --full",
        _decoding_grows,
    ),
    Claim(
        FEEDBACK,
        "Training is sequential and slower than a parallel transformer: its time over that one's",
        "not quoted",
        "feedback",
        "postil bench feedback --full",
        _recurrence_costs,
    ),
    Claim(
        FEEDBACK,
        "Decoding is cheaper with shared keys and values: a parallel transformer's time over its",
        "not quoted",
        "feedback",
        "postil bench feedback --full",
        _feedback_decodes,
    ),
    Claim(
        FEEDBACK,
        "Programs of 100 statements can be followed: accuracy of printed values with 3 / 5 variables",
        "transformer of 8 layers 33.7 / 37.5 %, Feedback of 4 layers 99.1 / 92.6 %",
        "algorithmic",
        "python benchmarks/algorithmic.py",
        _accuracies,
    ),
    Claim(
        FEEDBACK,
        "What is read of higher layers helps at equal depth and width: Tiny Shakespeare, validation bits per "
        "character",
        "enwik8: 0.962 with 77M parameters (test)",
        "comparison",
        COMPARE,
        partial(_bits, "feedback"),
    ),
    Claim(
        FEEDBACK,
        "One memory in the place of a cache for each layer: what decoding keeps of a text of a window",
        "not quoted",
        "comparison",
        COMPARE,
        partial(_states, "feedback"),
    ),
    Claim(
        AFT,
        "Quality comes near attention's at equal depth and width: Tiny Shakespeare, validation bits per "
        "character",
        "other texts and sizes",
        "comparison",
        COMPARE,
        partial(_bits, "aft"),
    ),
    Claim(
        AFT,
        "Local and convolutional biases serve pictures as well: digits of 8 x 8 pixels, bits per dimension",
        "other pictures and sizes",
        "aft-images",
        "python benchmarks/aft_images.py",
        _on_pictures,
    ),
)


def table(folder: Path = RESULTS) -> str:
    r"""Write the page from the results in a folder."""
    lines = [
        "# What the papers claim, and what was measured here",
        "",
        "Made by `python benchmarks/claims.py` from `benchmarks/results`; changes by hand are lost.",
        "",
        "| paper | claim | published | ours | command | budget |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += ["| " + " | ".join(_row(claim, load(claim.suite, folder))) + " |" for claim in CLAIMS]
    return "\n".join(lines) + "\n"


def _row(claim: Claim, document: dict[str, Any] | None) -> list[str]:
    cells = [f"[{claim.paper}]", claim.says, claim.published]
    if document is None:
        return [*cells, "not measured yet", f"`{claim.run}`", ""]
    rows = document.get("rows", document.get("contenders", []))
    return [*cells, claim.ours(rows), f"`{document.get('command', claim.run)}`", _budget(document)]


def _budget(document: dict[str, Any]) -> str:
    machine = document["machine"]
    if "budget" in document:
        limits = ", ".join(f"{name} {value}" for name, value in document["budget"].items())
        seeds = ", ".join(map(str, document["seeds"]))
        return f"{limits}; seeds {seeds}; {machine['device']}, {machine['threads']} threads"
    rounds = sorted({row["rounds"] for row in document["rows"] if "rounds" in row})
    taken = f"{', '.join(map(str, rounds))} rounds; " if rounds else ""
    device = machine.get("gpu") or machine["processor"]
    return f"{taken}{device}, torch {machine['torch']}, {machine['date']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    chosen = parser.parse_args()
    page = table()
    if chosen.check:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
        print("docs/claims.md is current" if current else "docs/claims.md is stale: run benchmarks/claims.py")
        return 0 if current else 1
    PAGE.write_text(page, encoding="utf-8")
    print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The table of claims is made of results, and the committed one is current."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import claims

ROOT = Path(__file__).parents[2]

MACHINE = {"processor": "a processor", "gpu": None, "torch": "2", "date": "2026-01-01"}


def spread(median: float) -> dict:
    return {"median": median, "quartiles": [median, median], "ratio": {"shared": {"median": median}}}


AFT_ROWS = [
    {
        "what": "forward+backward",
        "T": 1024,
        "D": 256,
        "rounds": 7,
        "over_linear_layers": spread(1.25),
        "times_slower_than_AFTLocal": {"SDPA attention": 2.5},
    },
    {"what": "peak memory, forward+backward", "name": "AFTLocal", "T": 65536, "units_of_TBD": 12.5},
    {"what": "decoding one token", "after": 10, "times": {"AFTLocal": spread(1.0)}},
    {"what": "decoding one token", "after": 3999, "times": {"AFTLocal": spread(1.02)}},
]


def write(folder: Path, name: str, rows: list, command: str = "python benchmarks/x.py") -> None:
    document = {"machine": MACHINE, "command": command, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(document))


def test_the_committed_table_is_current():
    assert claims.PAGE.read_text(encoding="utf-8") == claims.table()


def test_papers_are_known():
    known = re.findall(r"^\[(\w+)\]", (ROOT / "papers.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert {claim.paper for claim in claims.CLAIMS} <= set(known)


def test_without_results_nothing_is_claimed(tmp_path):
    rows = [line for line in claims.table(tmp_path).splitlines() if line.startswith("| [")]
    assert len(rows) == len(claims.CLAIMS) and all("not measured yet" in row for row in rows)


def test_figures_come_from_the_results(tmp_path):
    write(tmp_path, "aft-quick", AFT_ROWS, "python benchmarks/aft.py --quick")
    page = claims.table(tmp_path)
    for figure in (
        "12.5 at T = 65,536",
        "1.25 at T = 1,024",
        "2.50 at T = 1,024",
        "AFTLocal: 1.02 times as long after 3,999 tokens as after 10",
        "`python benchmarks/aft.py --quick`",
        "7 rounds; a processor, torch 2, 2026-01-01",
    ):
        assert figure in page
    # All sizes are better than a few.
    write(tmp_path, "aft", [{**AFT_ROWS[0], "T": 4096}], "python benchmarks/aft.py --full")
    page = claims.table(tmp_path)
    assert "1.25 at T = 4,096" in page and "12.5" not in page


def test_the_feedback_transformer(tmp_path):
    row = {"D": 128, "L": 4, "T": 128, "threads": 1, "rounds": 7}
    write(
        tmp_path,
        "feedback",
        [
            {**row, "what": "forward+backward", "over_parallel_transformer": {"shared": 1.01}},
            {**row, "what": "forward", "over_parallel_transformer": {"shared": 9.0}},
            {**row, "what": "forward+backward", "threads": 2, "over_parallel_transformer": {"shared": 9.0}},
            {
                "what": "decoding one token",
                "D": 512,
                "L": 6,
                "after": 128,
                "times": {"parallel transformer, cached": spread(1.1)},
            },
        ],
    )
    page = claims.table(tmp_path)
    assert "1.01 at D = 128, L = 4, T = 128 |" in page
    assert "1.10 at D = 512, L = 6 after 128 tokens |" in page


def test_a_comparison(tmp_path):
    row = {"mixer": "aft-local", "name": "aft-local", "parameters": 1000, "state_bytes": 512}
    row |= {"bits": {"mean": 2.0, "deviation": 0.05}}
    other = row | {"mixer": "feedback", "name": "feedback", "state_bytes": 2048}
    document = {
        "machine": {"device": "AVX512", "threads": 2},
        "budget": {"max_tokens": 64},
        "seeds": [1, 2],
        "contenders": [row, other],
    }
    (tmp_path / "comparison.json").write_text(json.dumps(document))
    page = claims.table(tmp_path)
    assert "| aft-local 2.000 ± 0.050 (1,000 parameters) |" in page
    assert "| feedback 2.000 ± 0.050 (1,000 parameters) |" in page and "| feedback 2.0 kB |" in page
    assert "max_tokens 64; seeds 1, 2; AVX512, 2 threads" in page


def test_a_smaller_task_is_named_as_such(tmp_path):
    row = {
        "name": "feedback",
        "accuracy": 0.987,
        "statements": 18,
        "variables": 3,
        "programs": 96000,
        "cpu_seconds": 250.0,
        "sizes": {"L": 3},
    }
    next_stage = {**row, "accuracy": 0.9, "statements": 100, "programs": 120000, "cpu_seconds": 600.0}
    write(tmp_path, "algorithmic", [row, next_stage])
    wanted = (
        "feedback of 3 layers 98.7 % (variables 3, statements 18), 90.0 % (variables 3, statements 100), "
        "after 120,000 programs and 10 minutes of one core"
    )
    assert wanted in claims.table(tmp_path)


def test_attention_and_pictures(tmp_path):
    row = {"what": "forward+backward", "D": 256, "rounds": 5, "B": 8}
    times = {256: 1.0, 1024: 8.0}
    rows = [{**row, "T": t, "times": {"MultiHeadAttention": spread(time)}} for t, time in times.items()]
    write(tmp_path, "attention", rows)
    write(tmp_path, "aft-images", [{"name": "conv-2d", "bits_per_dimension": 2.1}])
    page = claims.table(tmp_path)
    assert "| 1.00 at T = 256; 2.00 at T = 1,024 |" in page
    assert "| conv-2d 2.100 |" in page


@pytest.mark.parametrize("suite", sorted({claim.suite for claim in claims.CLAIMS} - {"comparison"}))
def test_commands_name_scripts(suite):
    assert (ROOT / "benchmarks" / f"{suite.replace('-', '_')}.py").exists()

r"""`postil info`: what a run is and how it did or, without a run, what this installation can do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from postil import REGISTRY, __version__
from postil.mixers.aft.kernel import KERNEL as AFT
from postil.mixers.feedback.kernel import KERNEL as FEEDBACK
from postil.training.checkpoints import steps
from postil.training.curves import read_metrics

__all__ = ["run"]


def run(argv: list[str]) -> int:
    r"""Say what a run is and how it did, or, without a run, what this installation can do."""
    parser = argparse.ArgumentParser(prog="postil info", description="Show a run, or this installation.")
    parser.add_argument("run", nargs="?", help="folder of a run")
    arguments = parser.parse_args(argv)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _run_facts(Path(arguments.run)) if arguments.run else _machine_facts():
        table.add_row(f"[bold]{name}[/]", value)
    Console(highlight=False).print(table)
    return 0


def _run_facts(path: Path) -> list[tuple[str, str]]:
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        s = run["settings"]
        s["mixer"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the folder of a run: {error}") from None
    metrics = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    valid = [line for line in metrics if line["kind"] in ("valid", "final")]
    facts = [
        ("mixer", s["mixer"]),
        ("parameters", f"{run['parameters']:,}"),
        ("text", f"{run['corpus']['name']} ({run['corpus']['size']:,} bytes, {run['corpus']['origin']})"),
        (
            "tokens",
            f"{run['tokenizer']}, {run['vocab_size']} kinds, {_many(run['tokens']['training'])} for training",
        ),
        ("updates", f"{metrics[-1]['update'] if metrics else 0} of {run['updates'] or 'no fixed number'}"),
    ]
    if run.get("begun_from"):
        facts.append(("begun from", "{path}, {mixer} after update {update}".format(**run["begun_from"])))
    if "unigram_bits" in run:
        facts.append(("unigram entropy", f"{run['unigram_bits']:.3f} {run['unit']}, the mark to beat"))
    if valid:
        best = min(valid, key=lambda line: line["bits"])
        facts.append(("last validation", _validation(valid[-1], run["unit"])))
        facts.append(("best validation", _validation(best, run["unit"])))
    facts.append(("checkpoints", ", ".join(each.name for each in steps(path / "checkpoints")) or "none"))
    facts.append(("versions", ", ".join(f"{name} {number}" for name, number in run["versions"].items())))
    return [(name, escape(value)) for name, value in facts]


def _many(tokens: int | None) -> str:
    return "without end" if tokens is None else f"{tokens:,}"


def _validation(line: dict[str, Any], unit: str) -> str:
    return f"{line['bits']:.3f} {unit} at update {line['update']}, {100 * line['accuracy']:.1f} % right"


def _machine_facts() -> list[tuple[str, str]]:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [
        ("postil", __version__),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("processor", torch.backends.cpu.get_cpu_capability()),
        ("GPUs", ", ".join(gpus) or "none"),
        ("mixers", ", ".join(REGISTRY)),
        *(("kernel", kernel.status()) for kernel in (AFT, FEEDBACK)),
    ]

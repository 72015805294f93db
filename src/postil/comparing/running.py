r"""From a plan to a folder with a report in it.

    runs/comparison/
      aft-local/seed-1/    an ordinary run, with its own record, metrics and checkpoints
      aft-local/seed-1.json  what was planned for it
      measurements.json    speed, memory and state of all contenders
      results.json         everything the report shows
      report.md index.html curves-over-tokens.svg curves-over-seconds.svg

A comparison takes hours, and machines stop. Nothing here has to remember how far it came: each run knows that
itself. Started again, the comparison asks every run to go on to its end, and those that are there say so.
"""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from postil import durable
from postil.comparing.measuring import ROUNDS, measure
from postil.comparing.plan import Contender
from postil.comparing.report import as_markdown, as_page, curve_files
from postil.sampling import Sampler, generate
from postil.training import checkpoints
from postil.training.curves import read_metrics
from postil.training.run import train
from postil.training.saved import load_run
from postil.training.settings import TrainSettings, settings_from_dict

__all__ = ["Stopped", "compare"]

SAMPLE = 300


class Stopped(Exception):
    r"""A run was asked to stop before its end; `code` is what the process should exit with."""

    def __init__(self, code: int):
        super().__init__("stopped; the same command goes on from here")
        self.code = code


def compare(
    contenders: list[Contender],
    seeds: list[int],
    out: Path,
    *,
    console: Console | None = None,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    r"""Train every contender with every seed, measure them, write the report into `out`; give its data.

    A comparison that was stopped goes on from what it has left in `out`, to the same result, bit for bit.

    Raises:
        ValueError: `out` holds a run of another plan; or seeds are missing or repeated.
        Stopped: a signal ended a run early.
    """
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds={seeds}: give one or more different numbers of at least 0")
    console = console or Console(highlight=False)
    plans = [(each, seed, _planned(each, seed, out)) for seed in seeds for each in contenders]
    # All plans are looked at before the first hour of training is spent.
    for _, _, settings in plans:
        _keep_plan(settings)
    for number, (each, seed, settings) in enumerate(plans, start=1):
        console.print(f"[bold]{each.name}, seed {seed}[/] (run {number} of {len(plans)})")
        _train_to_its_end(settings, console)
    console.print("measuring speed, memory and state side by side")
    measured = _measured(contenders, out, rounds)
    document = _document(contenders, seeds, out, measured)
    _write_report(document, out)
    return document


def _planned(contender: Contender, seed: int, out: Path) -> TrainSettings:
    return contender.with_seed(seed, str(out / contender.name / f"seed-{seed}"))


# The plan of a run stands beside its folder. A run under another plan would be compared as if it had been
# trained under this one; the budget belongs to the plan, so a finished run is finished for good.
def _keep_plan(settings: TrainSettings) -> None:
    folder, now = Path(str(settings.out)), settings.to_dict()
    path = folder.with_name(folder.name + ".json")
    if not path.exists():
        durable.make_directory(path.parent)
        _write_json(path, now)
        return
    # A setting that did not exist when the plan was written counts as today's default.
    before = settings_from_dict(durable.parse_json(durable.read_file(path))).to_dict()
    changed = [name for name in now if name != "out" and now[name] != before[name]]
    if changed:
        shown = "; ".join(f"{name}: {before[name]} there, {now[name]} now" for name in changed)
        raise ValueError(
            f"{folder} is a run under other settings ({shown}); choose another --out, or remove the folder"
        )


def _train_to_its_end(settings: TrainSettings, console: Console) -> None:
    folder = Path(str(settings.out))
    if _final(folder) is not None:
        console.print("  is there already")
        return
    if settings.max_time is not None:
        left = settings.max_time - _seconds(folder)
        settings = replace(settings, max_time=max(left, 0.001))
    outcome = train(settings, resume="auto", console=console)
    if outcome.bits is None:
        raise Stopped(outcome.exit_code or 130)


def _seconds(folder: Path) -> float:
    found = checkpoints.find(folder / "checkpoints", "auto", groups=[])
    return 0.0 if found is None else float(found.metadata["progress"]["seconds"])


def _metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def _final(folder: Path) -> dict[str, Any] | None:
    metrics = _metrics(folder)
    return metrics[-1] if metrics and metrics[-1]["kind"] == "final" else None


# ## Measured once
#
# Figures of different minutes do not compare. So they are taken together, kept, and taken anew, all of them,
# if one contender is new or has changed.
def _measured(contenders: list[Contender], out: Path, rounds: int) -> dict[str, Any]:
    path = out / "measurements.json"
    plans = {each.name: _shape(each.settings) for each in contenders}
    if path.exists():
        kept = durable.parse_json(durable.read_file(path))
        if all(kept["plans"].get(name) == shape for name, shape in plans.items()):
            return kept["measured"]
    measured = measure(contenders, rounds)
    _write_json(path, {"plans": plans, "rounds": rounds, "measured": measured})
    return measured


def _shape(settings: TrainSettings) -> dict[str, Any]:
    values = settings.to_dict()
    return {name: values[name] for name in ("mixer", "model", "optimizer", "precision", "threads", "text")}


# ## What the report shows
def _document(
    contenders: list[Contender], seeds: list[int], out: Path, measured: dict[str, Any]
) -> dict[str, Any]:
    first = contenders[0].settings
    record = durable.parse_json(
        durable.read_file(Path(str(_planned(contenders[0], seeds[0], out).out)) / "run.json")
    )
    return {
        "text": record["corpus"]["name"],
        "unit": record["unit"],
        "unigram_bits": record["unigram_bits"],
        "budget": {
            name: getattr(first, name)
            for name in ("updates", "epochs", "max_tokens", "max_time")
            if getattr(first, name) is not None
        },
        "seeds": seeds,
        "prompt": first.prompt,
        "machine": _machine(),
        "contenders": [_row(each, seeds, out, measured[each.name]) for each in contenders],
    }


def _machine() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in ("postil", "torch")}
        | {"python": platform.python_version()},
    }


def _row(contender: Contender, seeds: list[int], out: Path, measured: dict[str, Any]) -> dict[str, Any]:
    runs = [_run(_planned(contender, seed, out), seed) for seed in seeds]
    bits = [run["bits"] for run in runs]
    settings = contender.settings
    return {
        "name": contender.name,
        "mixer": settings.mixer,
        "model": settings.to_dict()["model"],
        "optimizer": settings.to_dict()["optimizer"],
        "parameters": contender.parameters,
        "bits": {
            "mean": statistics.fmean(bits),
            "deviation": statistics.stdev(bits) if len(bits) > 1 else None,
        },
        **measured,
        "runs": runs,
        "sample": _sample(_planned(contender, seeds[0], out)),
    }


def _run(settings: TrainSettings, seed: int) -> dict[str, Any]:
    folder = Path(str(settings.out))
    lines, final = _metrics(folder), _final(folder)
    assert final is not None
    # Evaluations while training read a part of the validation text, the final one all of it: a curve that
    # mixed them would end in a jump that means nothing.
    curve = [[line["tokens"], line["seconds"], line["bits"]] for line in lines if line["kind"] == "valid"]
    ends = {name: final[name] for name in ("update", "tokens", "seconds", "bits", "accuracy")}
    return {"seed": seed, **ends, "curve": curve}


def _sample(settings: TrainSettings) -> str:
    saved = load_run(str(settings.out))
    prompt = saved.tokenizer.encode(settings.prompt).tolist()
    longest = saved.model.max_len
    tokens = SAMPLE if longest is None else max(1, min(SAMPLE, longest - len(prompt)))
    ids = generate(saved.model, [prompt], tokens=tokens, sampler=Sampler(0.8), seed=0)
    return saved.tokenizer.decode(ids[0].tolist())


def _write_report(document: dict[str, Any], out: Path) -> None:
    _write_json(out / "results.json", document)
    durable.replace_file(out / "report.md", as_markdown(document).encode())
    durable.replace_file(out / "index.html", as_page(document).encode())
    for name, text in curve_files(document).items():
        durable.replace_file(out / name, text.encode())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    durable.replace_file(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())

r"""Speed, memory and state: measured side by side.

On a machine that does other things too, a time means little and a ratio much, if both of its sides were
measured in the same minutes. So all contenders run in one process, in a new random order every round, and a
round is short.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postil.comparing.plan import Contender
from postil.registry import build_language_model
from postil.sampling import Sampler, evaluating, generate
from postil.training.data import find_corpus, prepare_text
from postil.training.engine import make_fabric
from postil.training.loop import Session, start, train_update
from postil.training.settings import TrainSettings, settings_from_dict

__all__ = ["measure", "peak_bytes", "state_bytes"]

ROUNDS = 7
SAMPLED = 64


def measure(contenders: list[Contender], rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    r"""Measure each contender, freshly initialised.

    Gives for each name: tokens per second of training and of writing one text (median and quartiles over
    rounds), the bytes of the decoding state after a text of `seq_len` tokens, and the peak memory of an
    update above that of an idle process (`None` where the system does not tell).
    """
    sessions = {each.name: _session(each.settings) for each in contenders}
    training = _rates(
        {name: lambda s=session: _update(s) for name, session in sessions.items()}, rounds, sessions
    )
    writing = _rates(
        {name: lambda s=session: _write(s) for name, session in sessions.items()}, rounds, sessions
    )
    return {
        each.name: {
            "training_tokens_per_second": training[each.name],
            "sampling_tokens_per_second": writing[each.name],
            "state_bytes": state_bytes(sessions[each.name]),
            "peak_bytes": peak_bytes(each.settings),
        }
        for each in contenders
    }


def _session(settings: TrainSettings) -> Session:
    fabric = make_fabric(settings)
    fabric.launch()
    text = prepare_text(settings, find_corpus(settings))
    return start(
        settings,
        text,
        fabric,
        lambda: build_language_model(settings.mixer, settings.model, text.tokenizer.vocab_size),
    )


def _update(session: Session) -> int:
    session.loss.train()
    before = session.progress.tokens
    train_update(session)
    return session.progress.tokens - before


# No more tokens than the model has positions for: beyond them it would have to read the end of the text anew
# for each token, and the figure would be the cost of that.
def _write(session: Session) -> int:
    longest = session.model.max_len
    tokens = SAMPLED if longest is None else max(1, min(SAMPLED, longest - 1))
    generate(session.model, [[0]], tokens=tokens, sampler=Sampler(0.8))
    return tokens


def _rates(
    runs: dict[str, Callable[[], int]], rounds: int, sessions: dict[str, Session]
) -> dict[str, dict[str, Any]]:
    order = random.Random(0)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            began = _now(sessions[name])
            tokens = runs[name]()
            rates[name].append(tokens / max(_now(sessions[name]) - began, 1e-9))
    return {name: _spread(values) for name, values in rates.items()}


def _now(session: Session) -> float:
    if session.fabric.device.type == "cuda":
        torch.cuda.synchronize(session.fabric.device)
    return time.perf_counter()


def _spread(values: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(values * 2, n=4, method="inclusive")
    return {"median": float(f"{median:.4g}"), "quartiles": [float(f"{low:.4g}"), float(f"{high:.4g}")]}


# A state made by one `prefill` has no room in reserve, so its size is what must be remembered. Tensors
# without axes only count positions, and are left out.
def state_bytes(session: Session) -> int:
    r"""Bytes that decoding must remember after one text of `seq_len` tokens."""
    ids = torch.zeros(1, session.settings.model.seq_len, dtype=torch.int64, device=session.fabric.device)
    with evaluating(session.model):
        _, state = session.model.prefill(ids)
    return sum(x.numel() * x.element_size() for x in _tensors(state) if x.dim())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for part in value for x in _tensors(part)] if isinstance(value, list | tuple) else []


# ## Memory
#
# The system keeps the highest mark a process has reached, from its beginning. So each contender needs a
# process of its own, which makes two updates and is asked.
def peak_bytes(settings: TrainSettings) -> int | None:
    r"""Bytes by which two updates raise the peak memory of a fresh process: model, optimizer, activations.

    Raises:
        RuntimeError: that process failed; its last line is given.
    """
    on_cpu = settings.accelerator == "cpu" or not torch.cuda.is_available()
    if on_cpu and not Path("/proc/self/status").exists():
        return None
    done = subprocess.run(
        [sys.executable, "-m", "postil.comparing.measuring"],
        input=json.dumps(asdict(settings)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
        raise RuntimeError(f"measuring the memory of {settings.mixer} failed: {reason}")
    return int(done.stdout.strip().splitlines()[-1])


def _print_peak(settings: TrainSettings) -> None:
    make_fabric(settings)
    before = None if torch.cuda.is_available() and settings.accelerator != "cpu" else _status("VmRSS")
    session = _session(settings)
    for _ in range(2):
        _update(session)
    if before is None:
        print(torch.cuda.max_memory_allocated())
    else:
        print(max(0, _status("VmHWM") - before))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    _print_peak(settings_from_dict(json.loads(sys.stdin.read())))

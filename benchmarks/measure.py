r"""Measuring side by side.

On a shared machine a time means little and a ratio means much, if both of its sides were measured in the
same minute. So candidates run in one process, interleaved, in a new random order every round, and only
ratios *within* a round are kept. Six repeats of one ratio spread 12 % when measured this way, and 68 % when
the candidates run one after the other.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "compare",
    "forward_pass",
    "installed",
    "machine",
    "peak_memory",
    "print_peak",
    "steady_malloc",
    "training_pass",
    "write_results",
]

# Where there is a GPU, a suite runs on it without knowing: tensors and modules are made there by default.
# On a CPU that is the default anyway, and to say so costs 2 microseconds an operation: a default device puts
# a Python function before each. Decoding, which is made of small operations, was a fifth slower by it.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)

RESULTS = Path(__file__).parent / "results"
MINIMUM_SECONDS = 0.02


# A large tensor that is freed and allocated again costs page faults, about as much as the arithmetic on it.
# With these thresholds the memory stays with the process, for all candidates alike. They are read when a
# process starts, hence the restart.
def steady_malloc() -> None:
    r"""Restart this script, once, with an allocator that keeps freed memory; call it first in `main`."""
    wanted = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def installed(module: str) -> bool:
    r"""Say whether a module of another library can be imported here."""
    return importlib.util.find_spec(module) is not None


# ## What is timed
#
# A candidate is a module, the call that its library wants, and an input.
def forward_pass(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Any]:
    r"""Give a run that computes `call(x)` and keeps nothing for a backward pass."""

    def run() -> None:
        with torch.no_grad():
            call(x)

    return run


def training_pass(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Any]:
    r"""Give a run that computes `call(x)` and the gradients of its input and of `module`'s parameters."""
    x.requires_grad_()
    g = torch.randn_like(x)

    def run() -> None:
        x.grad = None
        module.zero_grad()
        call(x).backward(g)

    return run


# ## How
#
# Thread time leaves out what other processes did to this one, but counts only the calling thread. With more
# threads there is only the wall clock, and then the machine has to be quiet.
def compare(
    candidates: dict[str, Callable[[], Any]], rounds: int = 7, threads: int = 1, seed: int = 0
) -> dict[str, dict[str, Any]]:
    r"""Time candidates side by side.

    Each candidate first runs twice unmeasured. A round then runs every candidate once, in random order
    (a quick one several times, until it has used 20 ms).

    Returns:
        for each name: `median` and `quartiles` in seconds a call, `calls` (in one round), and `ratio`, a
        table from every other name to the median and quartiles of (this time / other's time) within rounds.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        calls = {name: _warm_up(run, clock) for name, run in candidates.items()}
        order = random.Random(seed)
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(rounds):
            for name in order.sample(list(candidates), len(candidates)):
                times[name].append(_time(candidates[name], calls[name], clock))
    finally:
        torch.set_num_threads(threads_before)
    return {name: _summary(name, times, calls[name]) for name in candidates}


def _warm_up(run: Callable[[], Any], clock: Callable[[], float]) -> int:
    run()
    return max(1, round(MINIMUM_SECONDS / max(_time(run, 1, clock), 1e-6)))


# A GPU is given its work and left alone, so the CPU's clock stops too early. Events are marks in the GPU's
# own queue. What counts is the work between them, and the waiting for the next piece of it.
def _time(run: Callable[[], Any], calls: int, clock: Callable[[], float]) -> float:
    gc.collect()
    gc.disable()
    try:
        if DEVICE == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(calls):
                run()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1000 / calls
        start = clock()
        for _ in range(calls):
            run()
        return (clock() - start) / calls
    finally:
        gc.enable()


def _summary(name: str, times: dict[str, list[float]], calls: int) -> dict[str, Any]:
    own = times[name]
    ratios = {
        other: [mine / theirs for mine, theirs in zip(own, times[other], strict=True)]
        for other in times
        if other != name
    }
    return {
        "median": _round(statistics.median(own)),
        "quartiles": _quartiles(own),
        "calls": calls,
        "ratio": {
            other: {"median": _round(statistics.median(values)), "quartiles": _quartiles(values)}
            for other, values in ratios.items()
        },
    }


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [_round(value) for value in values * 2]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [_round(low), _round(high)]


def _round(value: float) -> float:
    return float(f"{value:.4g}")


# The operating system keeps a high-water mark for each process, so memory is measured in a fresh one. What
# the interpreter and torch take before the work starts is not the candidate's, and is subtracted.
def print_peak(run: Callable[[], Any]) -> None:
    r"""In a fresh process: call `run` and print how far it raised the high-water mark, as one JSON line."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peak = torch.cuda.max_memory_allocated()
    else:
        before = _status("VmRSS")
        run()
        peak = _status("VmHWM")
    print(json.dumps({"peak_bytes": max(0, peak - before)}))


def peak_memory(command: list[str], timeout: float = 1800) -> int:
    r"""Run a command that ends with `print_peak` and return the bytes it printed.

    Raises:
        RuntimeError: the command failed (out of memory, for one); its last error line is named.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {reason}")
    return int(json.loads(done.stdout.strip().splitlines()[-1])["peak_bytes"])


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}; peak memory is measured on Linux")


def machine(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    r"""Describe what a figure depends on: processor, load, versions of torch, Python and `packages`.

    Of packages that are not installed nothing is said: they were not measured.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "steady_malloc": "MALLOC_TRIM_THRESHOLD_" in os.environ,
        "versions": _versions(packages),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_results(name: str, rows: list[dict[str, Any]], packages: tuple[str, ...] = ()) -> Path:
    r"""Write `results/<name>.json`: the machine, the command, and the rows; return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / (f"{name}-cuda.json" if DEVICE == "cuda" else f"{name}.json")
    document = {
        "machine": machine(packages),
        "command": " ".join(["python", *_shown(sys.argv)]),
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _shown(arguments: list[str]) -> list[str]:
    return ["benchmarks/" + Path(arguments[0]).name, *arguments[1:]]

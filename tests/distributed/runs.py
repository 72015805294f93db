"""Start runs, find their processes, compare what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from postil.registry import REGISTRY
from postil.training import checkpoints
from postil.training.checkpoints import Checkpoint
from postil.training.run import Outcome, train
from postil.training.settings import TrainSettings


def run(settings: TrainSettings, **options: Any) -> Outcome:
    return train(settings, console=Console(quiet=True), **options)


def last(path: str | Path | None) -> Checkpoint:
    checkpoint = checkpoints.latest(Path(str(path)) / "checkpoints")
    assert checkpoint is not None
    return checkpoint


# A parameter that cannot change the loss has a gradient of rounding errors, and Adam makes steps of full size
# out of any gradient. Its values mean nothing and differ between any two orders of summation.
def largest_difference(mixer: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    names = [n for n in one if not n.endswith(REGISTRY[mixer].idle or ("\0",))]
    assert len(names) > len(one) // 2
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in names)


def identical(one: Checkpoint, other: Checkpoint) -> bool:
    return one.step == other.step and all(
        torch.equal(tensor, other.tensors[group][name])
        for group in ("model", "optimizer")
        for name, tensor in one.tensors[group].items()
    )


class Started:
    """`postil train` in a process of its own, with whatever processes it starts."""

    def __init__(self, settings: TrainSettings, *flags: str, environment: dict[str, str] | None = None):
        self.out = Path(str(settings.out))
        record = self.out.with_suffix(".json")
        record.write_text(json.dumps(settings.to_dict()))
        command = [sys.executable, "-m", "postil.cli", "train", f"--config={record}", *flags]
        self.log = self.out.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
            )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.process.pid, *self.ranks().values()]:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Process ids by rank, read from their environments."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes()
                if b"postil.training.ranks" in command and str(self.out).encode() in command:
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    rank = next(e for e in environment if e.startswith(b"LOCAL_RANK="))
                    found[int(rank.partition(b"=")[2])] = int(entry.name)
            except (OSError, StopIteration, ValueError):
                continue
        return found

    def until_saved(self, step: int) -> dict[int, int]:
        deadline = time.monotonic() + 240
        while not (self.out / "checkpoints" / f"step-{step:08d}").exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return self.ranks()

    def ends_within(self, seconds: float) -> int:
        """Wait for the end; also that nothing is left of it. A machine with too much to do gets more time."""
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        code = self.process.wait(timeout=seconds * busy)
        deadline = time.monotonic() + 5
        while self.ranks() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.ranks(), "a process was left behind"
        return code

    @property
    def said(self) -> str:
        return self.log.read_text()

r"""Whole runs in forked processes, by the command line: started, struck, resumed, and compared.

The parent imports everything and trains nothing, so that each trial starts at once.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

# Imported for the children's sake.
import matplotlib.figure
import torch

import postil.cli.sample
import postil.cli.train
from postil.cli import main
from postil.training import checkpoints, loop, run, sitting
from postil.training.curves import read_metrics

__all__ = ["checkpoints", "loop", "matplotlib", "postil", "run"]

SAVE_EVERY = 5


class Run:
    r"""The settings of one run, its folder, and what it said in each sitting."""

    def __init__(self, child, folder, name="run", **changes):
        self.child, self.path, self.log = child, folder / name, folder / f"{name}.log"
        text = folder / "text.txt"
        words = ["the", "fox", "and", "a", "hen", "saw", "no", "dog"]
        text.write_text(" ".join(words[(i * i + 3 * i) % 8] for i in range(1500)))
        self.settings = {
            "text": str(text),
            "out": str(self.path),
            "updates": 30,
            "evaluate_every": 15,
            "evaluate_windows": 8,
            "save_every": SAVE_EVERY,
            "log_every": 1,
            "sample_every": 0,
            "prompt": "the ",
            "sample_tokens": 4,
            "threads": 1,
            "model": {"d_model": 16, "n_layers": 1, "heads": 2, "seq_len": 16, "dropout": 0.1},
            "optimizer": {"batch_size": 4, "warmup": 5, "lr": 1e-2, "schedule": "constant"},
        }
        for key, value in changes.items():
            old = self.settings.get(key)
            self.settings[key] = {**old, **value} if isinstance(old, dict) else value

    def start(self, *flags, before=lambda: None, output=None):
        r"""Train, or go on, in a child; `before` runs there first and may change what it likes."""
        file = self.path.with_suffix(".json")
        file.write_text(json.dumps(self.settings))

        def sitting():
            speak_into(self.log, output)
            before()
            return main(["train", f"--config={file}", "--resume=auto", *flags])

        return self.child(sitting)

    def whole(self, *flags, **options):
        r"""Train to the end; it must go well."""
        code = self.start(*flags, **options).wait(600)
        assert code == 0, self.said
        return self

    @property
    def said(self):
        return self.log.read_text() if self.log.exists() else ""

    @property
    def one_line(self):
        r"""What a command said that failed: one line, and no traceback."""
        lines = [line for line in self.said.splitlines() if line.startswith("postil train: error")]
        assert len(lines) == 1 and "Traceback" not in self.said, self.said
        return lines[0]

    @property
    def last(self):
        return checkpoints.latest(self.path / "checkpoints")

    @property
    def losses(self):
        file = self.path / "metrics.jsonl"
        lines = read_metrics(file) if file.exists() else []
        return [(line["update"], line["loss"]) for line in lines if line["kind"] == "train"]

    def differs_from(self, other):
        r"""Name what is not equal to the last bit, `None` if nothing: numbers, losses, how far it came."""
        one, two = self.last, other.last
        if one is None or two is None or one.step != two.step:
            return "step"
        for group in ("model", "optimizer"):
            for name, tensor in two.tensors[group].items():
                if not torch.equal(one.tensors[group][name], tensor):
                    return name
        for key in ("update", "tokens", "best"):
            if one.metadata["progress"][key] != two.metadata["progress"][key]:
                return key
        return None if self.losses == other.losses else "losses"


# A child inherits pytest's capture of what it prints; it gets streams of its own, as a process has them.
def speak_into(log, output=None):
    r"""In a child: print errors into the file `log`, and the rest there too or into `output`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(os.open(output, os.O_WRONLY) if output else file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)


class Gate:
    r"""Lets a child say that it has come to a place: `tell()` there, `wait()` in the test."""

    def __init__(self):
        self.reading, self.writing = os.pipe()

    def tell(self):
        os.write(self.writing, b"x")

    def wait(self):
        os.read(self.reading, 1)


def at_update(number, action):
    r"""In a child: do `action` when update `number` is about to be made."""
    original = sitting.train_update

    def update(session):
        if session.progress.update + 1 == number:
            action(session)
        return original(session)

    sitting.train_update = update


def after_a_while(seed):
    r"""Random moments, none so early that nothing would ever get done."""
    moments = random.Random(seed)

    def wait(trial, path):
        before = len(checkpoints.steps(path))
        newest = checkpoints.steps(path)[-1:]
        until = time.monotonic() + 60
        while checkpoints.steps(path)[-1:] == newest and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.15))
        return before

    return wait


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))

r"""Trackers: the lines of `metrics.jsonl`, shown elsewhere as they are written.

A run always writes `metrics.jsonl`. A tracker gets the same lines, `{"kind": "valid", "update": 500, "loss":
...}`, and files each number as `valid/loss` at update 500. Whatever becomes of it, the training goes on: a
tracker that fails is left with one warning.

| kind | where | needs |
| --- | --- | --- |
| `csv` | `metrics.csv` in the run's folder | nothing |
| `tensorboard` | `tensorboard/` in the run's folder | `postil[track]` |
| `wandb` | wandb.ai, or `wandb/` in the run's folder with `WANDB_MODE=offline` | `wandb` |
| `trackio` | trackio's own folder, or a Space | `trackio` |
"""

from __future__ import annotations

import csv
import importlib
import os
import secrets
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

__all__ = ["TRACKERS", "CsvTracker", "TensorBoardTracker", "Tracker", "Trackers", "open_trackers"]

Line = Mapping[str, Any]


@runtime_checkable
class Tracker(Protocol):
    r"""What the training loop needs of a tracker."""

    def log(self, line: Line) -> None:
        r"""Take one line: `kind`, `update`, and numbers by name."""
        ...

    def close(self) -> None:
        r"""Bring everything to where it belongs; nothing follows."""
        ...


def _numbers(line: Line) -> dict[str, float]:
    left_out = ("kind", "update")
    return {
        f"{line['kind']}/{name}": value
        for name, value in line.items()
        if name not in left_out and isinstance(value, int | float) and not isinstance(value, bool)
    }


# Evaluations have other columns than updates. A column that is new costs one rewriting of the file, which
# happens once or twice in a run.
class CsvTracker:
    r"""A table with one row a line, `metrics.csv`; rows after `update`, which come again, are dropped."""

    def __init__(self, path: Path, update: int = 0):
        self.path = path
        rows = self._rows() if path.exists() else []
        kept = [row for row in rows if row.get("update", "").isdigit() and int(row["update"]) <= update]
        self.columns = list(kept[0]) if kept else ["kind", "update"]
        self._write(kept)

    def log(self, line: Line) -> None:
        r"""Append a row."""
        new = [name for name in line if name not in self.columns]
        if new:
            self.columns += new
            self._write([*self._rows(), line])
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(line)

    def close(self) -> None:
        r"""Do nothing: every row is on its way already."""

    def _rows(self) -> list[dict[str, str]]:
        with self.path.open(encoding="utf-8", newline="") as file:
            return [
                {name: value or "" for name, value in row.items() if name} for row in csv.DictReader(file)
            ]

    def _write(self, rows: Iterable[Line]) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self.path)


class TensorBoardTracker:
    r"""Event files for TensorBoard; what was logged after `update` is hidden by it."""

    def __init__(self, folder: Path, update: int = 0):
        _need("tensorboard", "postil[track]")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=update + 1)

    def log(self, line: Line) -> None:
        r"""Add each number as a scalar."""
        for name, value in _numbers(line).items():
            self._writer.add_scalar(name, value, line["update"])

    def close(self) -> None:
        r"""Write out and close the file."""
        self._writer.close()


# The two services have one interface: `init` gives a run, which logs and finishes. Both know a run again by
# what they are told here, so that resuming continues the curve.
class ServiceTracker:
    r"""A run of wandb or trackio; whether it is online is for their own environment variables to say."""

    def __init__(self, run: Any):
        self._run = run

    def log(self, line: Line) -> None:
        r"""Log all numbers of the line at its update."""
        self._run.log(_numbers(line), step=line["update"])

    def close(self) -> None:
        r"""Finish the run."""
        self._run.finish()


def _wandb(path: Path, name: str, settings: Mapping[str, Any], update: int) -> Tracker:
    wandb = _need("wandb", "wandb")
    # Without it, the service takes over the terminal and copies what is shown there.
    quiet = wandb.Settings(console="off")
    run = wandb.init(
        project="postil",
        name=name,
        id=_identity(path / "wandb-id", update),
        resume="allow",
        dir=str(path),
        config=dict(settings),
        settings=quiet,
    )
    return ServiceTracker(run)


def _trackio(path: Path, name: str, settings: Mapping[str, Any], update: int) -> Tracker:
    trackio = _need("trackio", "trackio")
    identity = _identity(path / "trackio-id", update)
    run = trackio.init(
        project="postil",
        name=f"{name}-{identity}",
        resume="allow",
        config=dict(settings),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return ServiceTracker(run)


# A run that starts anew is a new run there, even in the folder of an old one.
def _identity(file: Path, update: int) -> str:
    if update and file.exists():
        return file.read_text(encoding="utf-8").strip()
    identity = secrets.token_hex(4)
    file.write_text(identity, encoding="utf-8")
    return identity


TRACKERS = {
    "csv": lambda path, name, settings, update: CsvTracker(path / "metrics.csv", update),
    "tensorboard": lambda path, name, settings, update: TensorBoardTracker(path / "tensorboard", update),
    "wandb": _wandb,
    "trackio": _trackio,
}
"""How each kind is opened: from the run's folder, its name, its settings, and the update it goes on from."""


class Trackers:
    r"""Several trackers as one that never raises: the first failure of each is a warning, and its end."""

    def __init__(self, trackers: Mapping[str, Tracker]):
        self._trackers = dict(trackers)

    def log(self, line: Line) -> None:
        r"""Hand the line to each."""
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.log(line))

    def close(self) -> None:
        r"""Close each."""
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.close())
        self._trackers.clear()

    def _try(self, name: str, act: Any) -> None:
        try:
            act(self._trackers[name])
        except Exception as error:
            del self._trackers[name]
            cause = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(f"{name}: {cause}; training goes on without it", RuntimeWarning, stacklevel=4)


def open_trackers(
    kinds: Iterable[str],
    path: str | os.PathLike[str],
    *,
    name: str,
    settings: Mapping[str, Any],
    update: int = 0,
) -> Trackers:
    r"""Open trackers of kinds named in `TRACKERS` for the run in the folder `path`.

    `update` is the update the run goes on from. Nothing that was not asked for is imported.

    Raises:
        ValueError: there is no such kind.
        ModuleNotFoundError: the kind's package is not installed; the message says how to get it.
    """
    opened: dict[str, Tracker] = {}
    for kind in dict.fromkeys(kinds):
        if kind not in TRACKERS:
            raise ValueError(f"tracker {kind!r} is not known; there are {', '.join(TRACKERS)}")
        opened[kind] = TRACKERS[kind](Path(path), name, settings, update)
    return Trackers(opened)


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the tracker {module} needs it installed: pip install '{package}'"
        ) from error

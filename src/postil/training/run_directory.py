r"""The folder of one run: who may write in it, and the files that are not checkpoints.

    runs/name/
      run.json           settings, versions, corpus: replaced whole
      metrics.jsonl      one line an evaluation or log step: only ever appended to
      run.lock           who is writing
      checkpoints/       step-00000010, ...

Two runs that write here at the same time would destroy each other, so the first one holds a lock. And a run
that is started again by mistake must not write over the first: it has to say `resume` or `overwrite`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from postil import durable
from postil.training import checkpoints
from postil.training.lock import Lock, Locked

__all__ = ["RunDirectory", "RunDirectoryError"]

RUN = "run.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class RunDirectoryError(RuntimeError):
    r"""A run directory that cannot be used: path, cause and remedy in one line."""


class RunDirectory:
    r"""An open run directory: use as a context manager, or `close` it.

    In a run of several processes only the first opens it.
    """

    def __init__(self, path: Path, lock: Lock):
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self._lock = lock
        self._metrics: int | None = None
        self._lost = 0

    @classmethod
    def open(cls, path: str | Path, *, resume: bool = False, overwrite: bool = False) -> RunDirectory:
        r"""Create the directory or enter an old one, lock it, and make sure that it can be written.

        Call it when everything else about the run is known to be right, for it is the first thing that
        leaves a trace. `resume` allows a directory with a run in it and changes nothing there; with
        `overwrite` that run is removed: its checkpoints, metrics and `run.json`, nothing else.

        Raises:
            RunDirectoryError: if another run holds it, if it holds a run and neither is asked for, or if it
                cannot be written.
        """
        path = Path(path)
        if resume and overwrite:
            raise RunDirectoryError(f"{path}: resume and overwrite contradict each other")
        try:
            durable.make_directory(path)
            lock = Lock(path / "run.lock")
        except Locked as error:
            raise RunDirectoryError(
                f"{path}: {error}; wait for it, stop it, or choose another directory"
            ) from None
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be written: {durable.one_line(error)}") from error
        run = cls(path, lock)
        try:
            run._enter(resume, overwrite)
        except (OSError, checkpoints.CheckpointError) as error:
            run.close()
            raise RunDirectoryError(f"{path}: cannot be written: {durable.one_line(error)}") from error
        except BaseException:
            run.close()
            raise
        return run

    def _enter(self, resume: bool, overwrite: bool) -> None:
        found = [name for name in (RUN, METRICS) if os.path.lexists(self.path / name)]
        found += [each.name for each in checkpoints.steps(self.checkpoints)]
        if found and not (resume or overwrite):
            raise RunDirectoryError(
                f"{self.path}: holds a run already ({found[0]}); "
                "go on with --resume auto, remove it with --overwrite, or choose another --out"
            )
        # What cannot be written is found out now, not at the first checkpoint in an hour's time.
        for directory in (self.path, self.checkpoints):
            directory.mkdir(exist_ok=True)
            durable.remove_leftovers(directory, exclusive=self._lock.exclusive)
            probe = durable.temporary_beside(directory / "probe")
            durable.write_file(probe, b"can this be written?")
            probe.unlink()
        if overwrite:
            checkpoints.discard_later(self.checkpoints, -1)
            for name in (METRICS, RUN):
                (self.path / name).unlink(missing_ok=True)
        durable.sync(self.path)

    def write_json(self, value: Mapping[str, Any], name: str = RUN) -> None:
        r"""Replace a JSON file of the run: after a crash it is the old one or the new one.

        Raises:
            RunDirectoryError: if it cannot be written; the old one is then intact.
            ValueError: if `name` is not a plain file name.
        """
        path = durable.inside(self.path, name)
        try:
            durable.replace_file(path, (json.dumps(dict(value), indent=2) + "\n").encode())
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be written: {durable.one_line(error)}") from error

    def read_json(self, name: str = RUN) -> dict[str, Any] | None:
        r"""Return what a JSON file of the run holds, or `None` if there is none.

        Raises:
            RunDirectoryError: if it is damaged or cannot be read.
            ValueError: if `name` is not a plain file name.
        """
        path = durable.inside(self.path, name)
        try:
            return durable.parse_json(durable.read_file(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{path}: {durable.one_line(error)}") from None

    # A line is worth less than the training it is about: if it cannot be written it is counted and
    # forgotten, with one warning, and whatever part of it was written is cut off again.
    def log(self, record: Mapping[str, Any]) -> bool:
        r"""Append one line to `metrics.jsonl`; return whether it is there. Never raises for a failing disk.

        Numbers that JSON lacks become the texts "nan", "inf" and "-inf", which `float` understands.
        """
        line = (json.dumps({k: _number(v) for k, v in record.items()}, default=float) + "\n").encode()
        try:
            if self._metrics is None:
                self._metrics = os.open(self.path / METRICS, _APPEND, 0o666)
            size = os.fstat(self._metrics).st_size
            if os.write(self._metrics, line) != len(line):
                os.ftruncate(self._metrics, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                text = f"{self.path / METRICS}: cannot be written: {durable.one_line(error)}"
                warnings.warn(f"{text}; training goes on, lines are being lost", RuntimeWarning, stacklevel=2)
            return False
        return True

    @property
    def lost_lines(self) -> int:
        r"""How many lines of metrics could not be written."""
        return self._lost

    # A killed run has logged more steps than it has saved. Resuming repeats those, and their lines must
    # not be there twice.
    def cut_metrics(self, step: int, key: str = "step") -> int:
        r"""Keep only whole lines of `metrics.jsonl` whose `key` is at most `step`; return how many went.

        Lines without `key` stay. Memory: the file.

        Raises:
            RunDirectoryError: if it cannot be read or written; it is then as before.
        """
        path = self.path / METRICS
        self._close_metrics()
        try:
            lines = path.read_bytes().split(b"\n")
            kept = [line for line in lines[:-1] if _stays(line, key, step)]
            gone = len(lines) - len(kept) - (lines[-1] == b"")
            if gone:
                durable.replace_file(path, b"".join(line + b"\n" for line in kept))
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be cut: {durable.one_line(error)}") from error
        return gone

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None

    def close(self) -> None:
        r"""Close the files and let go of the lock; more than once does no harm."""
        self._close_metrics()
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _stays(line: bytes, key: str, step: int) -> bool:
    try:
        number = durable.parse_json(line).get(key)
    except ValueError:
        return False
    return not isinstance(number, int | float) or number <= step

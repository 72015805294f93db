r"""Staging: a site appears whole or not at all.

A build writes into a folder beside the site and changes places with it at the very end, by one rename.
Whatever ends a build before that (a fault in a note, a full disk, `kill -9`) leaves the old site as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["StagingError", "staged"]

MANIFEST = "build.json"


class StagingError(RuntimeError):
    r"""The output folder cannot be used."""


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    r"""Give a folder to build in; if the block ends without an error, it takes the place of `out`.

    Raises:
        StagingError: `out` holds something that is not a site of ours, or another build is under way.
    """
    out = out.resolve()
    stage, old = out.parent / f".{out.name}.building", out.parent / f".{out.name}.old"
    out.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(out.parent / f".{out.name}.lock", out):
        # A build killed between two renames, on a system without exchange, left the old site under this name.
        if old.exists() and not out.exists():
            old.rename(out)
        _refuse_strangers(out)
        for leftover in (stage, old):
            shutil.rmtree(leftover, ignore_errors=True)
        stage.mkdir()
        try:
            yield stage
            _exchange(stage, out, old)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def _refuse_strangers(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise StagingError(f"{out} is a file; give a folder to build the site in")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise StagingError(
            f"{out} holds files that no build of this publisher made; give an empty or a new folder"
        )


def _exchange(stage: Path, out: Path, old: Path) -> None:
    if not out.exists():
        stage.rename(out)
    elif not _swap(stage, out):
        out.rename(old)
        stage.rename(out)


# Linux and macOS can swap two names in one step; Python has no name for that call.
def _swap(a: Path, b: Path) -> bool:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return libc.renamex_np(os.fsencode(a), os.fsencode(b), 2) == 0
        return libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0
    except (OSError, AttributeError, TypeError):
        return False


@contextlib.contextmanager
def _only_one(lock: Path, out: Path) -> Iterator[None]:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StagingError(f"another build of {out} is under way") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)

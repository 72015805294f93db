r"""Where text is kept on disk, and how it gets there whole.

A file appears under its final name only when it is complete: it is written beside its place under another
name, flushed, and renamed. A reader therefore sees the old file or the new one, never half of either.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pooch

from postil.text.reading import TextError

__all__ = ["atomic_file", "cache_folder", "safe_name", "safe_path"]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_ABANDONED_AFTER = 3600.0


def cache_folder() -> Path:
    r"""Where downloads and token files live: `$POSTIL_CACHE`, or the user's cache folder."""
    return Path(os.environ.get("POSTIL_CACHE") or pooch.os_cache("postil"))


# A list of what is allowed cannot forget a trick, as a list of what is forbidden does.
def safe_name(name: str, kind: str = "name") -> str:
    r"""Return `name` if it can be the name of one file or folder.

    Raises:
        TextError: it is not 1 to 100 of the letters A-Z a-z, digits, dot, underscore and hyphen, or it
            starts with a dot.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TextError(
            f"{kind} {name!r}: use 1 to 100 of the characters A-Z a-z 0-9 . _ - and no dot at the start; "
            "a name is not a path"
        )
    return name


def safe_path(base: Path, name: str, kind: str = "name") -> Path:
    r"""Return the path of `name` directly under `base`.

    Raises:
        TextError: the name is not allowed, or a link leads out of `base`.
    """
    path = base / safe_name(name, kind)
    if path.resolve().parent != base.resolve():
        raise TextError(f"{kind} {name!r} leads out of {str(base)!r} through a link: remove the link")
    return path


# The rename is the moment of truth. The flush before it matters after a power cut: without it, some file
# systems keep the new name and lose the contents.
@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    r"""Open a file for writing that takes the name `path` only when the block ends without an error.

    Raises:
        TextError: the folder cannot be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from error
        raise


# A process killed while it wrote leaves its unfinished file behind. One that still writes touches its file
# all the time, so age tells the two apart.
def _remove_abandoned(folder: Path) -> None:
    for leftover in folder.glob(".*.part"):
        try:
            if time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER:
                leftover.unlink()
        except FileNotFoundError:
            continue


def _cannot_write(path: Path, error: OSError) -> TextError:
    return TextError(
        f"cannot write {str(path)!r}: {error.strerror or error}; free space there, or name another cache "
        "folder in POSTIL_CACHE"
    )

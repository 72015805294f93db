r"""Where text is kept on disk, and how a large file gets there whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pooch

from postil import durable
from postil.text.reading import TextError

__all__ = ["atomic_file", "cache_folder"]


def cache_folder() -> Path:
    r"""Where downloads and token files live: `$POSTIL_CACHE`, or the user's cache folder."""
    return Path(os.environ.get("POSTIL_CACHE") or pooch.os_cache("postil"))


# A download or a token file can be larger than memory, so unlike a small file it is written piece by piece.
@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    r"""Open a file for writing that takes the name `path` only when the block ends without an error.

    What processes that no longer run left unfinished beside it is removed.

    Raises:
        TextError: the folder cannot be written, or the disk is full.
    """
    try:
        durable.make_directory(path.parent)
        durable.remove_leftovers(path.parent)
        temporary = durable.temporary_beside(path)
        file = temporary.open("xb")
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        durable.sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from error
        raise


def _cannot_write(path: Path, error: OSError) -> TextError:
    return TextError(
        f"cannot write {str(path)!r}: {durable.one_line(error)}; free space there, or name another cache "
        "folder in POSTIL_CACHE"
    )

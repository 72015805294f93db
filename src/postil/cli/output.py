r"""Output that cannot stop what it reports on.

A training prints for hours. Its log may be a file on a disk that fills up, or a pipe whose reader has left,
and neither is a reason to stop training: the first line that cannot be written is reported once, and those
after it are dropped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

__all__ = ["discard_output", "lasting_output"]


# What Python still holds back would fail once more when it is flushed at exit, and cost the exit code. So
# the file descriptor itself leads nowhere from here on.
def discard_output() -> None:
    r"""Send standard output nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


class _Lasting:
    def __init__(self, file: Any):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError as error:
            return self._give_up(error, len(text))

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error, 0)

    def _give_up(self, error: OSError, size: int) -> int:
        discard_output()
        print(f"postil: warning: output cannot be written: {error.strerror}; going on", file=sys.stderr)
        return size


@contextmanager
def lasting_output() -> Iterator[None]:
    r"""In this block, standard output that fails is given up, with one warning on standard error."""
    with redirect_stdout(_Lasting(sys.stdout)):  # pyright: ignore[reportArgumentType]
        yield
        sys.stdout.flush()

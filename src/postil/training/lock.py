r"""A lock on a folder that a crash cannot leave closed.

The guard is `flock`: the kernel lets go of it when the process ends, however it ends, so a stale lock file
never blocks. The file's content, process id and start time, is for the message, and stands in for the
kernel where a file system has no locks.
"""

from __future__ import annotations

import errno
import json
import os
import time
import weakref
from pathlib import Path

from postil import durable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["Lock", "Locked"]

_NO_LOCKS_HERE = {errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS}


class Locked(RuntimeError):
    r"""Somebody else holds the lock: the message names the process."""


class Lock:
    r"""Hold the lock file at `path` from construction to `release`.

    `exclusive` says whether the kernel vouches for it.

    Raises:
        Locked: if another process, or another `Lock` in this one, holds it.
        OSError: if the file cannot be opened or written.
    """

    def __init__(self, path: Path):
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        self._file: int | None = os.open(path, flags, 0o666)
        try:
            self.exclusive = self._lock()
            if not self.exclusive:
                _ask_the_owner(self._file)
            me = {"pid": os.getpid(), "start": durable.process_start(os.getpid()), "host": durable.HOST}
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(me).encode(), 0)
        except BaseException:
            os.close(self._file)
            self._file = None
            raise
        _held.add(self)

    def _lock(self) -> bool:
        assert self._file is not None
        if fcntl is None:
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(_owner_in_words(self._file)) from None
        except OSError as error:
            if error.errno in _NO_LOCKS_HERE:
                return False
            raise
        return True

    # The file stays: if it were removed, a process that has it open already and one that makes it anew
    # could each lock their own.
    def release(self) -> None:
        r"""Let go; more than once does no harm."""
        if self._file is None:
            return
        try:
            os.ftruncate(self._file, 0)
        except OSError:
            pass
        finally:
            os.close(self._file)
            self._file = None

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


# A forked child shares its parent's lock, and a worker that outlives its parent would keep it closed.
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _owner(file: int) -> tuple[int, str, str]:
    try:
        owner = durable.parse_json(os.pread(file, 4096, 0))
        return int(owner["pid"]), str(owner["start"]), str(owner["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, "", ""


# The winner of two that start together needs a moment to write its name over that of a dead one.
def _owner_in_words(file: int) -> str:
    until = time.monotonic() + 1.0
    while True:
        pid, start, host = _owner(file)
        if pid and host != durable.HOST:
            return f"process {pid} on {host} is using it"
        if durable.is_running(pid, start):
            return f"process {pid} is using it"
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    if not pid:
        return "another process is using it"
    return f"process {pid} has ended, but a process that it started is still using it"


# Without the kernel's help a process on another machine cannot be asked: it counts as running.
def _ask_the_owner(file: int) -> None:
    pid, start, host = _owner(file)
    if pid and pid != os.getpid() and (host != durable.HOST or durable.is_running(pid, start)):
        raise Locked(f"process {pid} on {host} is using it (if it has ended, empty run.lock)")

r"""Files that survive a crash, a full disk and a second writer.

A file system keeps three promises worth building on: a rename within one folder happens whole or not at
all, `fsync` of a file brings its bytes to the disk, and `fsync` of a folder brings its names. Everything
a run leaves behind is written with these three, in this order: write under a temporary name, sync, rename,
sync the folder. Nothing under a final name is ever opened for writing.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

__all__ = [
    "HOST",
    "check_name",
    "inside",
    "is_running",
    "make_directory",
    "one_line",
    "parse_json",
    "process_start",
    "read_file",
    "remove_leftovers",
    "replace_file",
    "sync",
    "temporary_beside",
    "write_file",
]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_LEFTOVER = re.compile(
    r"\.postil-[A-Za-z0-9._-]+~(?P<host>[A-Za-z0-9.-]*)~(?P<pid>[0-9]+)~(?P<start>[0-9]*)~[0-9a-f]{8}"
)
HOST = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
_JSON_LIMIT = 64 * 2**20


# An allow-list, since a list of forbidden pieces is never complete: `..`, `/`, a leading dot, control
# characters, `C:`, and names that differ only by Unicode composition all fall to the same line.
def check_name(name: str, what: str = "name") -> str:
    r"""Return `name` if it can be one path component everywhere.

    Raises:
        ValueError: naming the name and what is allowed.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r}: expected 1 to 100 of the characters A-Z a-z 0-9 . _ -, not starting with a dot"
        )
    return name


def inside(base: str | Path, name: str, what: str = "name") -> Path:
    r"""Return `base/name`, sure to lie in `base` also after links are followed.

    Raises:
        ValueError: naming the name, if it is no plain name or leads out of `base`.
    """
    path = Path(base) / check_name(name, what)
    if Path(base).resolve() not in path.resolve().parents:
        raise ValueError(f"{what} {name!r}: leads outside {base}")
    return path


# `O_EXCL` and `O_NOFOLLOW` make it sure that the file is new and ours: a link planted under the same name
# is an error instead of a write to wherever it points.
def write_file(path: Path, data: bytes) -> None:
    r"""Create `path`, which must not exist, with `data` on the disk when the call returns.

    Raises:
        OSError: if it exists or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    file = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest[: 2**24]) :]
        os.fsync(file)
    finally:
        os.close(file)


# A name is an entry of its folder, so after a power cut a synced file can be without its name: the folder
# needs a sync of its own. Windows has none for folders, and some network file systems refuse it with
# `EINVAL`. There it is left to the system when names reach the disk.
def sync(path: Path) -> None:
    r"""Bring a file's bytes, or a folder's names, to the disk.

    Raises:
        OSError: if the system reports that they could not be written.
    """
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    file = os.open(path, os.O_RDONLY if folder or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(file)
    except OSError as error:
        if not (folder and error.errno == 22):
            raise
    finally:
        os.close(file)


def make_directory(path: Path) -> None:
    r"""Create `path` and what is missing above it, and bring the new names to the disk.

    Raises:
        OSError: if it cannot be made, or a file is in the way.
    """
    if not path.is_dir():
        if path.parent != path:
            make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    r"""Make `path` hold `data`: after a crash it holds the old bytes or the new ones, never a part.

    Raises:
        OSError: if it cannot be written; `path` is then as before.
    """
    temporary = temporary_beside(path)
    try:
        write_file(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


# The name says who is writing, so that whoever comes later can tell a crash's leftover from work in
# progress. The random part keeps two writers in one process apart; it comes from the system, because
# drawing from the seeded generators would change the training.
def temporary_beside(path: Path) -> Path:
    r"""Return a name beside `path` that no other process uses and `remove_leftovers` recognises."""
    pid = os.getpid()
    owner = f"{HOST}~{pid}~{process_start(pid)}~{secrets.token_hex(4)}"
    return path.with_name(f".postil-{path.name}~{owner}")


def remove_leftovers(directory: Path, *, exclusive: bool = False) -> list[Path]:
    r"""Remove what writers that no longer run left unfinished in `directory`; nothing else is touched.

    A writer on another machine cannot be asked whether it runs: its leftovers go only if `exclusive`, which
    the holder of the run's lock may say. What cannot be removed is left for the next time.
    """
    removed = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        owner = _LEFTOVER.fullmatch(path.name)
        if owner is None:
            continue
        here = owner["host"] == HOST
        if is_running(int(owner["pid"]), owner["start"]) if here else not exclusive:
            continue
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError:
            continue
        removed.append(path)
    return removed


# Process ids are used again, after a reboot soon. The pair of id and start time (clock ticks since the
# boot, so no clock change moves it) is not.
def process_start(pid: int) -> str:
    r"""Return when the process started, in a form only good for comparing; empty where that is unknown."""
    fields = _process_fields(pid)
    return fields[19] if len(fields) > 19 else ""


def is_running(pid: int, start: str = "") -> bool:
    r"""Whether process `pid` runs and, where both are known, started at `start`; a zombie does not run."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    fields = _process_fields(pid)
    if fields and fields[0] == "Z":
        return False
    now = process_start(pid)
    return not (start and now and start != now)


# The process's name stands in brackets and may itself hold brackets and spaces: read from the last one on.
def _process_fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


# A pipe under a file's name would block for ever and a link could lead anywhere, so both are refused
# before anything is opened.
def read_file(path: Path, *, size: int | None = None, limit: int = _JSON_LIMIT) -> bytes:
    r"""Return the bytes of a regular file that has exactly `size` bytes or, if `None`, at most `limit`.

    Raises:
        ValueError: if it is no regular file or has another size.
        OSError: if it cannot be read.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if size is not None and status.st_size != size:
        raise ValueError(f"has {status.st_size} bytes instead of {size}")
    if size is None and status.st_size > limit:
        raise ValueError(f"has {status.st_size} bytes, more than the {limit} allowed here")
    return path.read_bytes()


def parse_json(data: bytes) -> dict[str, Any]:
    r"""Return the object that `data` holds as JSON.

    Raises:
        ValueError: if it is no JSON, nested too deeply, or not an object.
    """
    try:
        value = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a JSON {type(value).__name__} instead of an object")
    return value


def one_line(error: BaseException) -> str:
    r"""Return the cause of an error in one line, without the path that the caller names anyway."""
    if isinstance(error, MemoryError):
        return "out of memory"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__

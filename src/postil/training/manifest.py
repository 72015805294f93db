r"""The manifest: what a checkpoint consists of, sealed so that it can vouch for the rest.

It is written last, so a folder with a manifest is complete, and it holds the size and the SHA-256 of every
other file. Nothing vouches for the manifest but itself: it carries the SHA-256 of its own content and must
stand on the disk in exactly one form, byte for byte, so that no flipped bit goes unseen. The seal is against
accidents. Whoever writes a checkpoint can seal it, so its content is still treated as a stranger's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from postil import durable

__all__ = ["FORMAT", "MANIFEST", "METADATA", "CheckpointError", "Manifest", "read_manifest", "write_manifest"]

FORMAT = 1
"""Counted up when an older reader could misunderstand what a newer writer wrote."""

MANIFEST = "manifest.json"
METADATA = "metadata.json"


class CheckpointError(RuntimeError):
    r"""A checkpoint that cannot be written or read: path and cause in one line."""

    def __init__(self, message: str, *, newer_format: bool = False):
        super().__init__(message)
        self.newer_format = newer_format


# A group lists its files, though one is written today: a model too large for one process will write one
# file a process, and this reader will already read them.
@dataclass(frozen=True)
class Manifest:
    r"""Step, files with size and SHA-256, the files of each group, and names that share one tensor."""

    step: int
    best: bool = False
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    r"""Write `manifest` into `folder` and bring it to the disk.

    Raises:
        OSError: if it cannot be written.
    """
    content = {
        "format": FORMAT,
        "release": _release(),
        "step": manifest.step,
        "best": manifest.best,
        "files": {name: {"size": size, "sha256": digest} for name, (size, digest) in manifest.files.items()},
        "groups": manifest.groups,
        "tied": manifest.tied,
    }
    durable.write_file(folder / MANIFEST, _sealed(content))


def _release() -> str:
    try:
        return version("postil")
    except PackageNotFoundError:
        return "unknown"


def _sealed(content: dict[str, Any]) -> bytes:
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": seal}, sort_keys=True, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    r"""Read the manifest of a checkpoint folder and check all that can be checked without the other files.

    Raises:
        CheckpointError: naming file and reason; `newer_format` is set if a later release wrote it.
    """
    path = folder / MANIFEST
    try:
        _refuse_foreign(folder)
        data = durable.read_file(path)
        content = durable.parse_json(data)
        intact = data == _sealed({key: value for key, value in content.items() if key != "sha256"})
        number = content.get("format")
        if isinstance(number, int) and number > FORMAT:
            raise CheckpointError(
                f"{path}: format {number}, written by Postil {content.get('release')!r}; "
                f"Postil {_release()!r} reads formats up to {FORMAT}",
                newer_format=intact,
            )
        if not intact:
            raise ValueError("damaged: its content does not fit its own SHA-256")
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"format {number!r}: expected a number from 1 to {FORMAT}")
        return _checked(content)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path}: {durable.one_line(error)}") from None


# Files of `torch.save` and folders of `torch.distributed.checkpoint` are what people will try first. Their
# readers elsewhere unpickle, which runs whatever the file says. The error names the reason, so that nobody
# looks for a switch that allows it: there is none.
def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such checkpoint")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: a checkpoint is a folder with a {MANIFEST}, this is a file "
            "(.pt and .ckpt files are pickles, which can run commands when read: refused)"
        )
    if not (folder / MANIFEST).exists():
        if (folder / ".metadata").exists():
            raise CheckpointError(
                f"{folder}: a torch.distributed.checkpoint folder, "
                "whose .metadata is a pickle, which can run commands when read: refused"
            )
        raise CheckpointError(
            f"{folder}: no {MANIFEST} in it: not a checkpoint, or an incomplete copy of one"
        )


def _checked(content: dict[str, Any]) -> Manifest:
    step, best = content.get("step"), content.get("best")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0 or not isinstance(best, bool):
        raise ValueError(f"step={step!r}, best={best!r}: expected a number and a truth value")
    files = {}
    for name, file in _dictionary(content.get("files"), "files").items():
        size, digest = (_dictionary(file, name).get(key) for key in ("size", "sha256"))
        if isinstance(size, bool) or not isinstance(size, int) or size < 0 or not isinstance(digest, str):
            raise ValueError(f"size {size!r}, sha256 {digest!r} of {name!r}: expected a number and a text")
        files[durable.check_name(name, "file")] = (size, digest)
    groups = _dictionary(content.get("groups"), "groups")
    for group, names in groups.items():
        if not isinstance(names, list) or not all(isinstance(n, str) and n in files for n in names):
            raise ValueError(f"group {group!r} names {names!r}, which are not all in its list of files")
    tied = _dictionary(content.get("tied"), "tied")
    for group, pairs in tied.items():
        if not all(isinstance(source, str) for source in _dictionary(pairs, group).values()):
            raise ValueError(f"tied names of group {group!r}: expected pairs of names")
    if METADATA not in files or MANIFEST in files:
        raise ValueError(f"its files are {sorted(files)}: expected {METADATA}, not itself, among them")
    return Manifest(step, best, files, groups, tied)


def _dictionary(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what!r} is {type(value).__name__}: expected an object")
    return value

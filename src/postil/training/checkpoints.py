r"""Checkpoints: named tensors and JSON, written so that a crash at any moment loses nothing.

A checkpoint is a folder, `step-00000010`, that appears by one rename when everything in it is on the disk:

- `<group>.safetensors`: tensors by name, one file a group (`model`, `optimizer`, `random`, ...);
- `metadata.json`: whatever else the training must remember;
- `manifest.json`, written last: format number, step, and size and SHA-256 of every other file.

Both formats hold data only. A pickle, in which other checkpoints come, runs commands when it is read; no
line on this path reads one. Damage is found before use: one flipped bit in a weights file gives wrong
numbers and no error from any tensor format, so every byte is checked against the manifest first.

This module takes values and gives values; it knows neither models nor optimizers (`capture` does).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from postil import durable
from postil.training import tensor_files
from postil.training.manifest import METADATA, CheckpointError, Manifest, read_manifest, write_manifest

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWarning",
    "discard_later",
    "find",
    "latest",
    "load",
    "save",
    "steps",
]

_STEP = re.compile(r"step-(?P<step>[0-9]{1,18})(?P<old>\.old)?")


class CheckpointWarning(UserWarning):
    r"""Something about a checkpoint that a person should know, and that stopped nothing."""


@dataclass(frozen=True)
class Checkpoint:
    r"""What a checkpoint holds: `tensors[group][name]`, on the CPU, and the metadata as they were saved."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    metadata: dict[str, Any]
    path: Path
    best: bool = False


def save(
    directory: str | Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    metadata: Mapping[str, Any],
    keep: int = 3,
    best: bool = False,
) -> Path:
    r"""Write `directory/step-<step>`, then remove all but the last `keep` and the last `best` one.

    Names that are one tensor are stored once and come back as one tensor; the prefixes of wrappers
    (`torch.compile`, data parallelism) are left out of names. Metadata must be what JSON can hold.
    Memory: the CPU copy of one group if it lives elsewhere. Disk: at most `keep + 2` checkpoints.

    Raises:
        CheckpointError: with path and cause, if it could not be written; everything saved before is intact
            and nothing stands under the final name.
        ValueError: for a negative step, `keep` below 1, or a group name that cannot be a file name.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step={step}, keep={keep}: expected a step of at least 0, keep of at least 1")
    text = json.dumps(dict(metadata), indent=1).encode()
    final = Path(directory) / f"step-{step:08d}"
    try:
        durable.make_directory(final.parent)
        durable.remove_leftovers(final.parent)
        temporary = durable.temporary_beside(final)
        try:
            temporary.mkdir()
            _write(temporary, Manifest(step=step, best=best), tensors, text)
            _clear(final)
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        durable.sync(final.parent)
    except (OSError, SafetensorError, MemoryError, RuntimeError) as error:
        raise CheckpointError(f"{final}: cannot save the checkpoint: {durable.one_line(error)}") from error
    try:
        _prune(final.parent, step, keep)
    except (OSError, CheckpointError) as error:
        warnings.warn(f"{final.parent}: cannot remove old checkpoints: {error}", CheckpointWarning, 2)
    return final


# The library that writes the tensors makes files that only their owner may read; other users of a shared
# disk get what the folder grants. Digests are taken from what can be read back, not from memory.
def _write(
    folder: Path, manifest: Manifest, tensors: Mapping[str, Mapping[str, Tensor]], metadata: bytes
) -> None:
    for group, named in tensors.items():
        path = folder / f"{durable.check_name(group, 'group')}.safetensors"
        manifest.tied[group] = tensor_files.write(path, named)
        path.chmod(folder.stat().st_mode & 0o666)
        durable.sync(path)
        manifest.groups[group] = [path.name]
        manifest.files[path.name] = tensor_files.size_and_digest(path)
    durable.write_file(folder / METADATA, metadata)
    manifest.files[METADATA] = (len(metadata), hashlib.sha256(metadata).hexdigest())
    write_manifest(folder, manifest)
    durable.sync(folder)


# A folder cannot replace another by a rename, so a checkpoint of the same step steps aside first. `.old`
# counts as a checkpoint for `latest`, so a crash between the two renames still finds one.
def _clear(final: Path) -> None:
    if not os.path.lexists(final):
        return
    old = final.with_name(final.name + ".old")
    if os.path.lexists(old):
        _remove(old)
    if _whole(final) is None:
        _set_aside(final)
    else:
        final.rename(old)


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}")
    path.rename(aside)
    warnings.warn(f"{path} is damaged or holds files of others: moved to {aside}", CheckpointWarning, 4)


# What may be removed is only what we can show to be ours and whole: a valid manifest, every file of it
# in its size, and no file beside them. So neither damaged checkpoints nor the notes that somebody keeps
# inside one are ever lost, and a damaged one does not take the place of a good one among the last `keep`.
def _whole(path: Path) -> Manifest | None:
    try:
        manifest = read_manifest(path)
        sizes = {entry.name: entry.lstat().st_size for entry in path.iterdir()}
    except (CheckpointError, OSError):
        return None
    sizes.pop("manifest.json", None)
    return manifest if sizes == {name: size for name, (size, _) in manifest.files.items()} else None


def _prune(directory: Path, step: int, keep: int) -> None:
    manifests = {path: _whole(path) for path in steps(directory)}
    whole = [path for path, manifest in manifests.items() if manifest is not None and manifest.step <= step]
    replaced = [path for path in whole if path.suffix == ".old" and path.with_suffix("") in whole]
    current = [path for path in whole if path not in replaced]
    best = [path for path in current if (manifest := manifests[path]) is not None and manifest.best][-1:]
    for path in [*replaced, *(path for path in current[:-keep] if path not in best)]:
        _remove(path)


# Removing file by file would leave half a checkpoint under a good name if the process died meanwhile:
# it loses its name first.
def _remove(path: Path) -> None:
    if _whole(path) is None:
        return _set_aside(path)
    doomed = durable.temporary_beside(path)
    path.rename(doomed)
    shutil.rmtree(doomed)


def discard_later(directory: str | Path, step: int) -> list[Path]:
    r"""Take the checkpoints after `step` out of the way: a run that goes back does not meet its old future.

    Those that are whole are removed, others renamed. `step=-1` takes all.

    Raises:
        CheckpointError: if one cannot be removed.
    """
    later = [path for path in steps(directory) if _number(path) > step]
    for path in later:
        try:
            _remove(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed: {durable.one_line(error)}") from error
    return later


def steps(directory: str | Path) -> list[Path]:
    r"""Return the checkpoint folders in `directory` by step, oldest first, whether or not they are whole.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    try:
        paths = [path for path in Path(directory).iterdir() if _STEP.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: {durable.one_line(error)}") from error
    # By the number, never by a file's time: copying, unpacking and clock changes rewrite times.
    return sorted(paths, key=lambda path: (_number(path), path.suffix != ".old", path.name))


def _number(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match is not None, path
    return int(match["step"])


def load(path: str | Path, *, verify: bool = True, groups: Collection[str] | None = None) -> Checkpoint:
    r"""Read the checkpoint folder `path`, or only some of its groups.

    Every file is checked against its size and SHA-256 before its first tensor is made; `verify=False` leaves
    the SHA-256 out. Memory: the result and the bytes of one file.

    Raises:
        CheckpointError: naming file and reason, for whatever is damaged, missing, foreign or too new.
    """
    path = Path(path)
    manifest = read_manifest(path)
    chosen = manifest.groups if groups is None else {g: manifest.groups.get(g) for g in groups}
    try:
        metadata = durable.parse_json(_read(path, METADATA, manifest, verify))
    except ValueError as error:
        raise CheckpointError(f"{path / METADATA}: {error}") from None
    tensors: dict[str, dict[str, Tensor]] = {}
    for group, files in chosen.items():
        if files is None:
            raise CheckpointError(f"{path}: no group {group!r}; it has {', '.join(sorted(manifest.groups))}")
        tensors[group] = {}
        for name in files:
            data = _read(path, name, manifest, verify)
            try:
                tensors[group].update(tensor_files.parse(data))
            except Exception as error:
                raise CheckpointError(f"{path / name}: damaged: {durable.one_line(error)}") from error
        _tie(tensors[group], manifest.tied.get(group, {}), path)
    return Checkpoint(manifest.step, tensors, metadata, path, manifest.best)


def _read(path: Path, name: str, manifest: Manifest, verify: bool) -> bytes:
    size, digest = manifest.files[name]
    try:
        data = durable.read_file(path / name, size=size)
    except (OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path / name}: {durable.one_line(error)}") from error
    if verify and hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(f"{path / name}: damaged: its SHA-256 is not the one in manifest.json")
    return data


def _tie(tensors: dict[str, Tensor], tied: dict[str, str], path: Path) -> None:
    for name, source in tied.items():
        if source not in tensors:
            raise CheckpointError(
                f"{path / 'manifest.json'}: {name!r} is tied to {source!r}, which is not there"
            )
        tensors[name] = tensors[source]


def latest(directory: str | Path, *, groups: Collection[str] | None = None) -> Checkpoint | None:
    r"""Load the checkpoint of the highest step that is whole, or give `None` where there is none at all.

    Damaged ones on the way are skipped with a `CheckpointWarning` that names file and reason.

    Raises:
        CheckpointError: if there are checkpoints and none can be read, for starting from nothing would then
            hide a loss; or if the latest is of a newer format.
    """
    skipped: list[CheckpointError] = []
    for path in reversed(steps(directory)):
        try:
            checkpoint = load(path, groups=groups)
            if checkpoint.step != _number(path):
                raise CheckpointError(f"{path}: its manifest says step {checkpoint.step}")
        except CheckpointError as error:
            if error.newer_format:
                raise
            skipped.append(error)
            continue
        for error in skipped:
            warnings.warn(f"skipped a damaged checkpoint: {error}", CheckpointWarning, 2)
        return checkpoint
    if skipped:
        raise CheckpointError(f"{directory}: none of {len(skipped)} checkpoints can be read; {skipped[0]}")
    return None


def find(
    directory: str | Path, which: str | Path = "auto", *, groups: Collection[str] | None = None
) -> Checkpoint | None:
    r"""Load a run's checkpoint: `"auto"` the latest, if any; `"best"`; or one by its path or its name.

    Raises:
        CheckpointError: as `latest` and `load`; also if there is no best one.
    """
    if which == "auto":
        return latest(directory, groups=groups)
    if which == "best":
        whole = [(path, _whole(path)) for path in steps(directory)]
        best = [path for path, manifest in whole if manifest is not None and manifest.best]
        if not best:
            raise CheckpointError(f"{directory}: no checkpoint is marked as the best")
        return load(best[-1], groups=groups)
    named = Path(directory) / which
    return load(named if named.exists() else which, groups=groups)

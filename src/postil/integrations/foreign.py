r"""Checkpoints of other projects: read as data, written as runs.

Such a checkpoint is a pickle, which could run commands when it is read. PyTorch's restricted reader admits
tensors, numbers, texts and containers of them and refuses the rest; there is no option for more. What was
read becomes a run, so every command that knows runs knows it: `sample`, `info`, `export`.
"""

from __future__ import annotations

import platform
import re
import time
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postil.registry import ModelSettings, build_language_model
from postil.text import Tokenizer
from postil.training import checkpoints
from postil.training.run_directory import RunDirectory
from postil.training.settings import TrainSettings
from postil.training.tensor_files import plain_names

__all__ = ["ForeignCheckpointError", "layers_of", "read_checkpoint", "tensors_of", "write_run"]


class ForeignCheckpointError(ValueError):
    r"""A checkpoint that cannot be read, or is not of the architecture it was said to be."""


def read_checkpoint(path: Path) -> Any:
    r"""Read a `.pt` or `.pth` file onto the CPU: tensors, numbers, texts, and containers of them.

    Raises:
        ForeignCheckpointError: it is not such a file, is damaged, or holds anything else.
    """
    # PyTorch's own message tells how to switch the protection off; what matters is what was asked for.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ForeignCheckpointError(f"{path}: {error.strerror or error}") from None
    except Exception as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        cause = f"it asks for {asked[1]}" if asked else "it is damaged, or no file of torch.save"
        raise ForeignCheckpointError(
            f"{path}: cannot be read as weights: {cause} (only tensors and plain values are read, because "
            "anything else in a pickle could run commands)"
        ) from None


def tensors_of(path: Path, value: Any) -> dict[str, Tensor]:
    r"""Check that a value is a state dict; give its tensors by name, without the prefixes of wrappers.

    Raises:
        ForeignCheckpointError: it is anything else.
    """
    if (
        not isinstance(value, Mapping)
        or not value
        or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items())
    ):
        raise ForeignCheckpointError(f"{path}: holds no state dict, that is tensors by name")
    plain = plain_names(value)
    return {plain[name]: tensor for name, tensor in value.items()}


def layers_of(names: Mapping[str, Any], prefix: str) -> int:
    r"""Count the layers by their names, `prefix.0.`, `prefix.1.`, ..."""
    rest = (name.removeprefix(prefix + ".") for name in names if name.startswith(prefix + "."))
    return 1 + max(
        (int(head) for head in (name.partition(".")[0] for name in rest) if head.isdigit()), default=-1
    )


# A tensor that finds no place would make another model than the one that was trained, without a word. So
# loading is strict, and the message names what is left over on either side.
def write_run(
    out: Path,
    mixer: str,
    model: ModelSettings,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    *,
    source: Path,
    step: int = 0,
) -> None:
    r"""Write a run with one checkpoint, as training would have.

    Raises:
        ForeignCheckpointError: the tensors are not those of such a model.
        RunDirectoryError: the folder holds a run already, or cannot be written.
    """
    built = build_language_model(mixer, model, tokenizer.vocab_size)
    try:
        built.load_state_dict(dict(tensors), strict=True)
    except (RuntimeError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ForeignCheckpointError(f"{source}: does not fit a {mixer} of {model}: {cause}") from None
    settings = TrainSettings(
        mixer=mixer, model=model, updates=max(step, 1), prompt=tokenizer.decode([0]), out=str(out)
    )
    record = {
        "settings": settings.to_dict(),
        "parameters": sum(p.numel() for p in built.parameters()),
        "corpus": {"name": source.name, "size": source.stat().st_size, "origin": f"imported from {source}"},
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "tokens": {"training": 0, "validation": 0},
        "updates": step,
        "unit": "bits per character",
        "versions": {name: version(name) for name in ("postil", "torch")}
        | {"python": platform.python_version()},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    with RunDirectory.open(out) as directory:
        directory.write_json(record)
        metadata = {"settings": settings.to_dict(), "tokenizer": tokenizer.to_dict(), "imported": str(source)}
        checkpoints.save(directory.checkpoints, step, {"model": built.state_dict()}, metadata)

r"""A trained model, read back from the folder of its run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from postil.language_model import LanguageModel
from postil.registry import ModelSettings, build_language_model, with_positions
from postil.text import Tokenizer, tokenizer_from_dict
from postil.training import checkpoints
from postil.training.checkpoints import Checkpoint, CheckpointError
from postil.training.settings import TrainSettings, settings_from_dict

__all__ = ["SavedRun", "as_stored", "check_claims", "load_run"]


@dataclass(frozen=True)
class SavedRun:
    r"""A model in evaluation mode, with the vocabulary it was trained on."""

    model: LanguageModel
    tokenizer: Tokenizer
    settings: TrainSettings
    checkpoint: Checkpoint


# Everything comes from the checkpoint itself: the vocabulary and the shape of the model are those it was
# trained with, whatever has become of the text or of the folder around it.
def load_run(path: str | Path, which: str = "auto") -> SavedRun:
    r"""Read a run: its latest good checkpoint, its `best`, or the one that `which` or `path` names.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    path = Path(path)
    if (path / "manifest.json").exists():
        checkpoint = checkpoints.load(path, groups=["model"])
    else:
        checkpoint = checkpoints.find(path / "checkpoints", which, groups=["model"])
    if checkpoint is None:
        raise CheckpointError(f"{path}: holds no checkpoint; give the folder of a run or of a checkpoint")
    settings = _settings(checkpoint.metadata, checkpoint.path)
    tokenizer = tokenizer_from_dict(checkpoint.metadata.get("tokenizer"))
    try:
        settings = as_stored(settings, checkpoint)
        tensors = checkpoint.tensors["model"].values()
        check_claims(settings.model, len(tensors), sum(tensor.numel() for tensor in tensors))
        model = build_language_model(settings.mixer, settings.model, tokenizer.vocab_size)
        model.load_state_dict(checkpoint.tensors["model"], strict=True)
    except (RuntimeError, TypeError, ValueError, MemoryError, OverflowError) as error:
        raise CheckpointError(f"{checkpoint.path}: its tensors do not fit its settings: {error}") from None
    return SavedRun(model.eval(), tokenizer, settings, checkpoint)


def as_stored(settings: TrainSettings, checkpoint: Checkpoint) -> TrainSettings:
    r"""Give the settings, and where a default has changed since, the value it had when they were stored."""
    rows = {name: tensor.shape[0] for name, tensor in checkpoint.tensors["model"].items() if tensor.dim()}
    return replace(settings, model=with_positions(settings.model, rows))


# The settings are a stranger's claim, and a model is built from them before its tensors are compared. What
# the tensors cannot back is not built. Positions may be computed and have no tensor, up to a limit.
def check_claims(model: ModelSettings, tensors: int, numbers: int) -> None:
    r"""Check that a file of so many tensors, and numbers in them, can be that of such a model.

    Raises:
        RuntimeError: naming the setting that it cannot back.
    """
    limits = {"n_layers": tensors, "d_model": numbers, "d_ff": numbers, "seq_len": max(numbers, 2**20)}
    for name, limit in limits.items():
        value = getattr(model, name)
        if value is not None and value > limit:
            raise RuntimeError(f"{name}={value}, and {tensors} tensors of {numbers} numbers in all")


def _settings(metadata: dict[str, Any], path: Path) -> TrainSettings:
    try:
        settings = settings_from_dict(metadata["settings"])
        settings.check()
        if not isinstance(settings.prompt, str):
            raise TypeError(f"prompt={settings.prompt!r} is no text")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: its settings cannot be used: {error}") from None
    return settings

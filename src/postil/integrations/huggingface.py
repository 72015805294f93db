r"""Models on the Hugging Face Hub, or in a folder of its form.

Three files say everything: `config.json` (mixer, shape, vocabulary), `model.safetensors`, and, for those who
read the folder with `transformers`, `tokenizer_config.json`. Weights are read from safetensors only. A
repository that has them as a pickle, which could run commands here, is refused, and so is one whose tensors
are not exactly those of its configuration.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from postil import durable
from postil.registry import ModelSettings, build_language_model
from postil.text import Tokenizer, tokenizer_from_dict
from postil.training.saved import SavedRun, check_claims
from postil.training.settings import settings_from_dict

__all__ = ["PretrainedModel", "model_settings"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"


# The library records what the constructor was given and hands it back on loading, so the constructor takes
# exactly what `config.json` holds: a name and two plain dictionaries.
class PretrainedModel(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="postil",
    pipeline_tag="text-generation",
    tags=["postil"],
):
    r"""A language model and its tokenizer, with `save_pretrained`, `from_pretrained` and `push_to_hub`.

    Raises:
        ValueError: the mixer, a setting or the description of the tokenizer is not of this version.
    """

    def __init__(self, *, mixer: str, settings: dict[str, Any], tokenizer: dict[str, Any]):
        super().__init__()
        self.tokenizer: Tokenizer = tokenizer_from_dict(tokenizer)
        self.model = build_language_model(mixer, model_settings(settings), self.tokenizer.vocab_size)
        # What `transformers` looks for, beside what the constructor takes.
        described = {"mixer": mixer, "settings": settings, "tokenizer": tokenizer}
        self._hub_mixin_config = {
            **described,
            "model_type": "postil",
            "architectures": ["PostilForCausalLM"],
            "vocab_size": self.tokenizer.vocab_size,
            "tie_word_embeddings": self.model.tied,
        }

    @classmethod
    def of(cls, run: SavedRun) -> PretrainedModel:
        r"""Wrap the model of a run; the parameters are shared, not copied."""
        settings = asdict(run.settings.model)
        wrapped = cls(mixer=run.settings.mixer, settings=settings, tokenizer=run.tokenizer.to_dict())
        wrapped.model = run.model
        return wrapped.eval()

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        r"""Give the logits of the token that follows each position."""
        return self.model(ids)

    def _save_pretrained(self, save_directory: Path) -> None:
        super()._save_pretrained(save_directory)
        described = {"tokenizer_class": "PostilTokenizer", "description": self.tokenizer.to_dict()}
        (save_directory / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")

    # The library's own version reads a `config.json` of any size, builds what it asks for, tries a pickle
    # where there are no safe weights, and loads what fits, leaving the rest as it was drawn.
    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, pretrained_model_name_or_path: str | Path, **download: Any
    ) -> PretrainedModel:
        r"""Load a model from a folder or from the Hub; `download` is for `hf_hub_download` (`revision`, ...).

        Raises:
            ValueError: it has no safe weights, is not of this version, or its files do not fit each other.
        """
        name = str(pretrained_model_name_or_path)
        config = _read_config(_file(name, CONFIG, download))
        if missing := {"mixer", "settings", "tokenizer"} - set(config):
            raise ValueError(f"{name}: its config.json lacks {', '.join(sorted(missing))}: not of Postil")
        path = _file(name, WEIGHTS, download)
        if path is None:
            raise ValueError(
                f"{name}: has no {WEIGHTS}; weights in other files (.bin, .pt) are pickles, which can run "
                "commands when read: refused"
            )
        try:
            with safe_open(path, framework="pt") as file:
                sizes = [math.prod(file.get_slice(tensor).get_shape()) for tensor in file.keys()]  # noqa: SIM118
            check_claims(model_settings(config["settings"]), len(sizes), sum(sizes))
            wrapped = cls(**{key: config[key] for key in ("mixer", "settings", "tokenizer")})
            safetensors.torch.load_model(wrapped, path, strict=True)
        except (SafetensorError, RuntimeError, TypeError, MemoryError, OverflowError, OSError) as error:
            raise ValueError(f"{path}: cannot be read as this model: {error}") from None
        return wrapped.eval()


def _file(model: str, name: str, download: dict[str, Any]) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.exists() else None
    try:
        return Path(hf_hub_download(model, name, **download))
    except EntryNotFoundError:
        return None


def _read_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return durable.parse_json(durable.read_file(path.resolve()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {durable.one_line(error)}") from None


def model_settings(values: Any) -> ModelSettings:
    r"""Read the shape of a model from `config.json`.

    Raises:
        ValueError: it is not an object, or has a key that is no setting of this version.
    """
    if not isinstance(values, dict):
        raise ValueError(f"the settings of a model are an object, not {values!r:.80}")
    try:
        return settings_from_dict(values, ModelSettings)
    except TypeError as error:
        raise ValueError(f"the settings of a model cannot be used: {error}") from None

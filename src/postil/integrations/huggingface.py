r"""Models on the Hugging Face Hub, or in a folder of its form.

Three files say everything: `config.json` (mixer, shape, vocabulary), `model.safetensors`, and, for those who
read the folder with `transformers`, `tokenizer_config.json`. Weights are read from safetensors only. A
repository that has them as a pickle, which could run commands here, is refused, and so is one whose tensors
are not exactly those of its configuration.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn

from postil.registry import ModelSettings, build_language_model
from postil.text import Tokenizer, tokenizer_from_dict
from postil.training.saved import SavedRun
from postil.training.settings import settings_from_dict

__all__ = ["PretrainedModel", "model_settings"]

WEIGHTS = "model.safetensors"


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

    # The library's own version would try a pickle next, and would load what fits and leave the rest as it was
    # drawn.
    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> PretrainedModel:
        download = {
            name: options.pop(name)
            for name in ("revision", "cache_dir", "force_download", "token", "local_files_only")
        }
        if missing := {"mixer", "settings", "tokenizer"} - set(options):
            raise ValueError(f"{model_id}: its config.json lacks {', '.join(sorted(missing))}: not of Postil")
        wrapped = cls(**options)
        path = Path(model_id) / WEIGHTS
        if not Path(model_id).is_dir():
            try:
                path = Path(hf_hub_download(model_id, WEIGHTS, **download))
            except EntryNotFoundError:
                raise _no_weights(model_id) from None
        elif not path.exists():
            raise _no_weights(model_id)
        try:
            safetensors.torch.load_model(wrapped, path, strict=True)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ValueError(f"{path}: cannot be read as this model: {error}") from None
        return wrapped.eval()


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


def _no_weights(model: str) -> ValueError:
    return ValueError(
        f"{model}: has no {WEIGHTS}; weights in other files (.bin, .pt) are pickles, which can run commands "
        "when read: refused"
    )

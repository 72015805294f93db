r"""GPT-2 style models trained by nanoGPT.

The architecture is ours: learned positions, layers that normalise first, GELU. Four things are written
differently, and each has an exact translation:

| nanoGPT | here |
| --- | --- |
| query, key and value in one map, `c_attn` | three maps: its rows, cut in three |
| embeddings are added as they are | scaled by $\sqrt{D}$, so the table is divided by it |
| the output layer has no bias, and shares the embedding's table | a bias of zeros, a table of its own |
| `bias=False`: no biases in any map or norm | biases of zeros |

What nanoGPT computes is the exact GELU, also with weights that OpenAI trained with its approximation by
$\tanh$. A checkpoint in the form of `transformers`' GPT-2, whose maps are stored transposed, is refused: it
is meant for that approximation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from postil.integrations.foreign import (
    ForeignCheckpointError,
    layers_of,
    read_checkpoint,
    tensors_of,
    write_run,
)
from postil.registry import ModelSettings
from postil.text import Tokenizer

__all__ = ["import_nanogpt", "read_nanogpt"]


def import_nanogpt(checkpoint: Path, out: Path, tokenizer: Tokenizer, *, heads: int | None = None) -> None:
    r"""Turn a nanoGPT checkpoint into a run; `heads` only where the checkpoint does not say.

    Raises:
        ForeignCheckpointError: it is not such a model, or the vocabulary is of another size.
    """
    settings, tensors, step = read_nanogpt(checkpoint, heads=heads)
    found = tensors["embedding.linear.weight"].shape[0]
    if found != tokenizer.vocab_size:
        raise ForeignCheckpointError(
            f"{checkpoint}: is of {found} tokens, the vocabulary given has {tokenizer.vocab_size}"
            + ("; GPT-2's own tokenizer is not among Postil's" if found in (50257, 50304) else "")
        )
    write_run(out, "multi-head-attention", settings, tensors, tokenizer, source=checkpoint, step=step)


def read_nanogpt(
    checkpoint: Path, *, heads: int | None = None
) -> tuple[ModelSettings, dict[str, Tensor], int]:
    r"""Read a nanoGPT checkpoint: settings, parameters by our names, and the update it was saved at.

    Raises:
        ForeignCheckpointError: it is not of this architecture; the first difference is named.
    """
    value = read_checkpoint(checkpoint)
    whole = isinstance(value, Mapping) and "model" in value
    tensors = tensors_of(checkpoint, value["model"] if whole else value)
    arguments = value.get("model_args", {}) if whole else {}
    step = value.get("iter_num", 0) if whole else 0
    heads = arguments.get("n_head") if heads is None else heads
    if not isinstance(heads, int) or heads < 1:
        raise ForeignCheckpointError(f"{checkpoint}: does not say how many heads it has; say it by --heads")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    settings = _settings(checkpoint, tensors, heads)
    return (
        settings,
        _translated(checkpoint, tensors, settings),
        step if isinstance(step, int) and step > 0 else 0,
    )


def _settings(checkpoint: Path, tensors: dict[str, Tensor], heads: int) -> ModelSettings:
    layers = layers_of(tensors, "h")
    needed = ("wte.weight", "wpe.weight", "ln_f.weight", "h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight")
    missing = [name for name in needed if name not in tensors]
    if missing or not layers:
        raise ForeignCheckpointError(f"{checkpoint}: lacks {missing[0]!r}, so it is no model of nanoGPT's")
    width = tensors["wte.weight"].shape[1]
    if tuple(tensors["h.0.attn.c_attn.weight"].shape) == (width, 3 * width):
        raise ForeignCheckpointError(
            f"{checkpoint}: its maps are stored transposed, as transformers' GPT-2 does; that model has the "
            "tanh form of GELU, which Postil's does not"
        )
    return ModelSettings(
        d_model=width,
        n_layers=layers,
        heads=heads,
        d_ff=tensors["h.0.mlp.c_fc.weight"].shape[0],
        activation="gelu",
        positions="learned",
        seq_len=tensors["wpe.weight"].shape[0],
        dropout=0.0,
    )


LAYER = {
    "ln_1": "norm_self_attn",
    "attn.c_proj": "self_attn.output",
    "ln_2": "norm_ff",
    "mlp.c_fc": "feed_forward.layer1",
    "mlp.c_proj": "feed_forward.layer2",
}


def _translated(checkpoint: Path, tensors: dict[str, Tensor], s: ModelSettings) -> dict[str, Tensor]:
    # Older versions stored their causal mask beside the weights.
    left = {n: t for n, t in tensors.items() if not n.endswith((".attn.bias", ".attn.masked_bias"))}

    def take(name: str) -> Tensor:
        try:
            return left.pop(name)
        except KeyError:
            raise ForeignCheckpointError(f"{checkpoint}: lacks {name!r}") from None

    def affine(name: str) -> tuple[Tensor, Tensor]:
        weight = take(name + ".weight")
        return weight, left.pop(name + ".bias", torch.zeros(weight.shape[0], dtype=weight.dtype))

    table = take("wte.weight")
    new = {
        "embedding.linear.weight": table / math.sqrt(s.d_model),
        "embedding.positional_encodings": take("wpe.weight")[:, None],
        "generator.projection.weight": left.pop("lm_head.weight", table),
        "generator.projection.bias": torch.zeros(table.shape[0], dtype=table.dtype),
    }
    for index in range(s.n_layers):
        ours = f"backbone.layers.{index}."
        for name, our_name in LAYER.items():
            new[f"{ours}{our_name}.weight"], new[f"{ours}{our_name}.bias"] = affine(f"h.{index}.{name}")
        weight, bias = affine(f"h.{index}.attn.c_attn")
        for part, w, b in zip(("query", "key", "value"), weight.chunk(3), bias.chunk(3), strict=True):
            new[f"{ours}self_attn.{part}.linear.weight"], new[f"{ours}self_attn.{part}.linear.bias"] = w, b
    new["backbone.norm.weight"], new["backbone.norm.bias"] = affine("ln_f")
    if left:
        raise ForeignCheckpointError(
            f"{checkpoint}: has {sorted(left)[0]!r}, which no model of nanoGPT's has"
        )
    return new

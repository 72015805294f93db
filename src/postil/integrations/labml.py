r"""Language models of labml-nn's transformer and AFT experiments.

Their `AutoregressiveTransformer` has our parts under other names: `src_embed` is the embedding, `encoder` the
stack. The layers have the same names and the same computation (`tests/transformer` compares them), so only
what a state dict does not say must be told: the number of heads, and which activation a gate has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

__all__ = ["import_labml", "read_labml"]

PARTS = {"src_embed": "embedding", "encoder": "backbone", "generator": "generator"}


def import_labml(
    checkpoint: Path, out: Path, tokenizer: Tokenizer, *, heads: int | None, activation: str | None = None
) -> None:
    r"""Turn a labml-nn checkpoint into a run.

    Raises:
        ForeignCheckpointError: it is not such a model, or something that only the user knows is missing.
    """
    mixer, settings, tensors = read_labml(checkpoint, heads=heads, activation=activation)
    found = tensors["embedding.linear.weight"].shape[0]
    if found != tokenizer.vocab_size:
        raise ForeignCheckpointError(
            f"{checkpoint}: is of {found} tokens, the vocabulary given has {tokenizer.vocab_size}"
        )
    write_run(out, mixer, settings, tensors, tokenizer, source=checkpoint)


def read_labml(
    checkpoint: Path, *, heads: int | None, activation: str | None = None
) -> tuple[str, ModelSettings, dict[str, Tensor]]:
    r"""Read a labml-nn checkpoint: the mixer, the settings, and the parameters by our names.

    Raises:
        ForeignCheckpointError: it is not of an `AutoregressiveTransformer`, or a choice is missing.
    """
    tensors = tensors_of(checkpoint, read_checkpoint(checkpoint))
    foreign = sorted(name for name in tensors if name.partition(".")[0] not in PARTS)
    layers = layers_of(tensors, "encoder.layers")
    first = "encoder.layers.0."
    needed = ["src_embed.linear.weight", "generator.projection.weight", first + "feed_forward.layer1.weight"]
    missing = [name for name in needed if name not in tensors]
    if foreign or missing or not layers:
        wrong = f"has {foreign[0]!r}" if foreign else f"lacks {(missing or ['layers'])[0]!r}"
        raise ForeignCheckpointError(
            f"{checkpoint}: {wrong}; only AutoregressiveTransformer of labml-nn's basic and AFT experiments "
            "(src_embed, encoder, generator) can be imported"
        )
    width = tensors["src_embed.linear.weight"].shape[1]
    settings = ModelSettings(
        d_model=width,
        n_layers=layers,
        d_ff=tensors[first + "feed_forward.layer1.weight"].shape[0],
        activation=_activation(checkpoint, tensors, first, activation),
        dropout=0.0,
        **_positions(checkpoint, tensors),
    )
    mixer = _mixer(checkpoint, settings, tensors, first + "self_attn.", heads)
    renamed = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        renamed[f"{PARTS[part]}.{rest}"] = tensor
    return mixer, settings, renamed


# A learned table and the table of waves have one name. Only the second starts with a row of zeros and ones.
def _positions(checkpoint: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    table = tensors.get("src_embed.positional_encodings")
    if table is None or table.dim() != 3:
        raise ForeignCheckpointError(f"{checkpoint}: has no src_embed.positional_encodings of three axes")
    first = table[0, 0]
    waves = bool((first[0::2] == 0).all() and (first[1::2] == 1).all())
    return {"positions": "fixed" if waves else "learned", "seq_len": table.shape[0]}


def _activation(checkpoint: Path, tensors: dict[str, Tensor], first: str, chosen: str | None) -> str:
    gated = first + "feed_forward.linear_v.weight" in tensors
    kinds = ("glu", "bilinear", "reglu", "geglu", "swiglu") if gated else ("relu", "gelu")
    chosen = chosen or (None if gated else "relu")
    if chosen is None or chosen not in kinds:
        raise ForeignCheckpointError(
            f"{checkpoint}: activation={chosen!r}: its feed-forward parts can have {', '.join(kinds)}: which?"
        )
    return chosen


def _mixer(
    checkpoint: Path, settings: ModelSettings, tensors: dict[str, Tensor], attention: str, heads: int | None
) -> str:
    mask = tensors.get(attention + "local_mask")
    if mask is not None:
        settings.seq_len = mask.shape[0] if settings.positions == "fixed" else settings.seq_len
        settings.options = {"local_window_size": int(mask[0].sum())}
        if attention + "query.bias" not in tensors:
            settings.options["bias"] = False
        return "aft-local"
    if heads is None:
        raise ForeignCheckpointError(f"{checkpoint}: does not say how many heads it has; say it by --heads")
    settings.heads = heads
    if attention + "query.linear.bias" not in tensors:
        settings.options = {"bias": False}
    return "multi-head-attention"

r"""Every mixer by name.

One literal dictionary, so that a reader, the command line and the tests all look in the same place. A model
that appears here is held to every law of `tests/test_laws.py`, can be trained by `postil train --mixer NAME`
and takes part in `postil compare`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from postil.language_model import LanguageModel
from postil.mixers.multi_head_attention import MultiHeadAttention, attention, attention_reference

__all__ = ["REGISTRY", "Entry", "ModelSettings", "build_backbone", "build_language_model", "build_mixer"]


@dataclass
class ModelSettings:
    r"""The shape of a model. What only one mixer knows goes into `options`, by its constructor's names."""

    d_model: int = 128
    """Width of the model."""
    n_layers: int = 4
    """Number of layers."""
    heads: int = 4
    """Attention heads, where the mixer has heads."""
    d_ff: int | None = None
    """Width of the feed-forward part; None means 4 * d_model."""
    activation: str = "relu"
    """Activation of the feed-forward part: relu, gelu, glu, bilinear, reglu, geglu or swiglu."""
    positions: str = "learned"
    """Positions added to the embeddings: learned, fixed (sinusoidal) or none."""
    seq_len: int = 256
    """Longest text the position tables are made for."""
    dropout: float = 0.1
    """Probability of dropping an activation during training."""
    tie_weights: bool = False
    """Use the embedding's table in the generator too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the mixer's constructor, such as window."""


@dataclass(frozen=True)
class Entry:
    r"""A mixer or a whole backbone: how it is built, where it comes from, and its equation in two forms.

    `fast` and `reference` take what the module's `operands` gives. `example` is small enough for a test.
    """

    build: Callable[[ModelSettings], nn.Module]
    paper: str
    fast: Callable[..., Any]
    reference: Callable[..., Any]
    example: ModelSettings = field(
        default_factory=lambda: ModelSettings(d_model=8, n_layers=1, heads=2, d_ff=16, seq_len=32, dropout=0.0)
    )
    is_backbone: bool = False


REGISTRY: dict[str, Entry] = {
    "multi-head-attention": Entry(
        build=lambda s: MultiHeadAttention(s.heads, s.d_model, s.dropout, **s.options),
        paper="vaswani2017",
        fast=attention,
        reference=attention_reference,
    ),
}

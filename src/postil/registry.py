r"""Every mixer by name.

One literal dictionary, so that a reader, the command line and the tests all look in the same place. A model
that appears here is held to every law of `tests/test_laws.py`, can be trained by `postil train --mixer NAME`
and takes part in `postil compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from postil.language_model import LanguageModel
from postil.mixer import Backbone
from postil.mixers.aft import (
    AFTConv,
    AFTConv2d,
    AFTFull,
    AFTLocal,
    AFTSimple,
    aft_conv,
    aft_conv2d,
    aft_conv2d_reference,
    aft_conv_reference,
    aft_full,
    aft_full_reference,
    aft_local,
    aft_local_reference,
    aft_simple,
    aft_simple_reference,
)
from postil.mixers.feedback import (
    FeedbackAttention,
    FeedbackTransformer,
    FeedbackTransformerKV,
    FeedbackTransformerLayer,
    feedback_transformer,
    feedback_transformer_reference,
)
from postil.mixers.multi_head_attention import MultiHeadAttention, attention, attention_reference
from postil.transformer.encoder_decoder import CausalStack, Generator
from postil.transformer.feed_forward import feed_forward
from postil.transformer.layers import TransformerLayer
from postil.transformer.positions import (
    EmbeddingsWithLearnedPositionalEncoding,
    EmbeddingsWithPositionalEncoding,
    TokenEmbeddings,
)

__all__ = [
    "REGISTRY",
    "Entry",
    "ModelSettings",
    "build_backbone",
    "build_language_model",
    "with_positions",
]


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

    @property
    def feed_forward_width(self) -> int:
        r"""Width of the hidden layer: `d_ff`, or four times the model's."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff


def _small(**changes: Any) -> ModelSettings:
    return replace(ModelSettings(d_model=8, n_layers=1, heads=2, d_ff=16, seq_len=32, dropout=0.0), **changes)


@dataclass(frozen=True)
class Entry:
    r"""A mixer or a whole backbone: how it is built, where it comes from, and its equation in two forms.

    `fast` and `reference` take what the module's `operands` gives. `example` is small enough for a test.
    `idle` names parameters that no loss can move: the law that every parameter learns spares them.
    """

    build: Callable[[ModelSettings], Any]
    paper: str
    fast: Callable[..., Any]
    reference: Callable[..., Any]
    example: ModelSettings = field(default_factory=_small)
    is_backbone: bool = False
    idle: tuple[str, ...] = ()


def _feedback_layer(s: ModelSettings, shared: bool, positions: int | None) -> FeedbackTransformerLayer:
    attention = FeedbackAttention(
        s.heads, s.d_model, s.dropout, is_kv_precomputed=shared, positions=positions or s.seq_len
    )
    network = feed_forward(s.activation, s.d_model, s.feed_forward_width, s.dropout)
    return FeedbackTransformerLayer(
        d_model=s.d_model, attn=attention, feed_forward=network, dropout_prob=s.dropout
    )


# `positions`, the number of distances a layer tells apart, belongs to its attention; the other options are
# those of the whole. In training no distance reaches `seq_len`, so more rows would never be learnt.
def _feedback(s: ModelSettings, positions: int | None = None, **options: Any) -> FeedbackTransformerKV:
    layer = _feedback_layer(s, True, positions)
    return FeedbackTransformerKV(layer, s.n_layers, s.d_model, s.heads, **options)


def _feedback_original(s: ModelSettings, positions: int | None = None, **options: Any) -> FeedbackTransformer:
    return FeedbackTransformer(_feedback_layer(s, False, positions), s.n_layers, **options)


# Both forms of the Feedback Transformer also give the memory they wrote; a backbone's result is the sequence.
def _feedback_fast(*operands: Any) -> Tensor:
    return feedback_transformer(*operands)[0]


def _feedback_reference(*operands: Any) -> Tensor:
    return feedback_transformer_reference(*operands)[0]


REGISTRY: dict[str, Entry] = {
    "multi-head-attention": Entry(
        build=lambda s: MultiHeadAttention(s.heads, s.d_model, s.dropout, **s.options),
        paper="vaswani2017",
        fast=attention,
        reference=attention_reference,
        # A bias of the keys adds the same number to all scores of a query, and the softmax takes it away. In
        # the AFT family it scales numerator and denominator alike.
        idle=("key.linear.bias",),
    ),
    "aft-full": Entry(
        build=lambda s: AFTFull(s.d_model, s.seq_len, **s.options),
        paper="zhai2021",
        fast=aft_full,
        reference=aft_full_reference,
        idle=("key.bias",),
    ),
    "aft-simple": Entry(
        build=lambda s: AFTSimple(s.d_model, **s.options),
        paper="zhai2021",
        fast=aft_simple,
        reference=aft_simple_reference,
        idle=("key.bias",),
    ),
    "aft-local": Entry(
        build=lambda s: AFTLocal(s.d_model, s.seq_len, **{"local_window_size": 32, **s.options}),
        paper="zhai2021",
        fast=aft_local,
        reference=aft_local_reference,
        idle=("key.bias",),
        example=_small(options={"local_window_size": 5}),
    ),
    "aft-conv": Entry(
        build=lambda s: AFTConv(s.heads, s.d_model, **{"kernel_size": 32, **s.options}),
        paper="zhai2021",
        fast=aft_conv,
        reference=aft_conv_reference,
        idle=("key.bias",),
        example=_small(options={"kernel_size": 5}),
    ),
    # What it reads are pictures, line by line; only their owner knows how long a line is.
    "aft-conv-2d": Entry(
        build=lambda s: AFTConv2d(s.heads, s.d_model, **{"kernel_size": 5, **s.options}),
        paper="zhai2021",
        fast=aft_conv2d,
        reference=aft_conv2d_reference,
        idle=("key.bias",),
        example=_small(options={"width": 4, "kernel_size": 3}),
    ),
    "feedback": Entry(
        build=lambda s: _feedback(s, **s.options),
        paper="fan2020",
        fast=_feedback_fast,
        reference=_feedback_reference,
        example=_small(n_layers=2, options={"positions": 40}),
        is_backbone=True,
    ),
    "feedback-original": Entry(
        build=lambda s: _feedback_original(s, **s.options),
        paper="fan2020",
        fast=_feedback_fast,
        reference=_feedback_reference,
        example=_small(n_layers=2, options={"positions": 40}),
        is_backbone=True,
    ),
}


EMBEDDINGS: dict[str, Callable[[ModelSettings, int], TokenEmbeddings]] = {
    "learned": lambda s, vocab: EmbeddingsWithLearnedPositionalEncoding(s.d_model, vocab, s.seq_len),
    "fixed": lambda s, vocab: EmbeddingsWithPositionalEncoding(s.d_model, vocab, s.seq_len),
    "none": lambda s, vocab: TokenEmbeddings(s.d_model, vocab),
}


def build_language_model(mixer: str, settings: ModelSettings, vocab_size: int) -> LanguageModel:
    r"""Build a language model over a registered mixer, freshly initialised from PyTorch's global generator.

    Raises:
        ValueError: the name, a size, a choice or an option is not known or does not fit; it is named.
    """
    if settings.positions not in EMBEDDINGS:
        raise ValueError(f"positions={settings.positions!r} is not known; there are {', '.join(EMBEDDINGS)}")
    embedding = EMBEDDINGS[settings.positions](settings, vocab_size)
    backbone = build_backbone(mixer, settings)
    generator = Generator(vocab_size, settings.d_model)
    return LanguageModel(
        embedding,
        backbone,
        generator,
        max_len=_longest(embedding, backbone),
        tie_weights=settings.tie_weights,
    )


# Until the default of `positions` was `seq_len` it was 4,096, for every model; a checkpoint of that time does
# not say so, but its tables have as many rows.
def with_positions(settings: ModelSettings, rows: Mapping[str, int]) -> ModelSettings:
    r"""Give the settings of a stored model with its number of distances, where they left it to the default.

    `rows` are the lengths of the stored tensors by name.
    """
    tables = [n for name, n in rows.items() if name.endswith(".attn.key_pos_embeddings")]
    if not tables or "positions" in settings.options or tables[0] == settings.seq_len:
        return settings
    return replace(settings, options={**settings.options, "positions": tables[0]})


# Position embeddings and position biases are tables with an end. The shortest one decides.
def _longest(*parts: Any) -> int | None:
    modules = [module for part in parts for module in part.modules()]
    limits = [getattr(module, "max_len", None) for module in modules]
    return min((limit for limit in limits if limit is not None), default=None)


def build_backbone(mixer: str, settings: ModelSettings) -> Backbone:
    r"""Build all layers between embedding and generator.

    Raises:
        ValueError: as `build_language_model`.
    """
    if mixer not in REGISTRY:
        raise ValueError(f"mixer={mixer!r} is not known; there are {', '.join(REGISTRY)}")
    entry = REGISTRY[mixer]
    try:
        module = entry.build(settings)
    except TypeError as error:
        raise ValueError(f"options={settings.options} do not fit mixer={mixer!r}: {error}") from error
    if entry.is_backbone:
        return module
    layer = TransformerLayer(
        d_model=settings.d_model,
        self_attn=module,
        feed_forward=feed_forward(
            settings.activation, settings.d_model, settings.feed_forward_width, settings.dropout
        ),
        dropout_prob=settings.dropout,
    )
    return CausalStack(layer, settings.n_layers)

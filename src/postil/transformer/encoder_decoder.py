r"""Stacks of layers: encoder, decoder, and the causal stack of a language model.

All are the same loop over layers with a norm at the end, which pre-norm layers need because their sum was
never normalised. They differ in what a position may read:

| stack | reads of its own sequence | reads besides |
| --- | --- | --- |
| `Encoder` | everything, or what its mask allows | |
| `CausalStack` | the past and itself | |
| `Decoder` | the past and itself | the encoder's output, its *memory* |

A stack that reads only the past can be decoded: its state is a tuple with the state of each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from postil.masks import Mask, MaskLike, as_mask
from postil.mixer import State, check_sizes
from postil.transformer.layers import TransformerLayer, clone_layers

__all__ = ["CausalStack", "Decoder", "Encoder", "EncoderDecoder", "Generator"]


class Encoder(nn.Module):
    r"""`n_layers` layers, each drawn independently, and a final norm.

    `layer` becomes the first of them; the others are copies with parameters drawn anew.

    Source: [vaswani2017], Section 3.1. Deviation: pre-norm layers, hence the final norm.
    """

    def __init__(self, layer: TransformerLayer, n_layers: int):
        super().__init__()
        self.d_model = layer.d_model
        self.layers = clone_layers(layer, n_layers)
        self.norm = nn.LayerNorm(layer.d_model)

    def forward(self, x: Float[Tensor, "T B D"], mask: MaskLike = None) -> Float[Tensor, "T B D"]:
        r"""Compute all positions; `mask=None`: every position reads every other."""
        for layer in self.layers:
            x = layer(x=x, mask=mask)
        return self.norm(x)


# A language model that reads one token ahead learns to copy it, and reports a splendid loss. So causality
# is not left to a mask that somebody might forget: it is part of what this class is.
class CausalStack(Encoder):
    r"""An encoder whose positions read only the past: the backbone of a language model.

    It has an encoder's parameters under an encoder's names, so either's checkpoint loads into the other.
    """

    def forward(self, x: Float[Tensor, "T B D"], mask: MaskLike = None) -> Float[Tensor, "T B D"]:
        r"""Compute all positions; `mask` can hide more (padding, say), never less than the future."""
        return super().forward(x, _causal(mask))

    def prefill(
        self, x: Float[Tensor, "T B D"], state: State | None = None
    ) -> tuple[Float[Tensor, "T B D"], State]:
        r"""Compute a chunk after the positions that `state` remembers (`None`: it is the first)."""
        x, state = _through(self.layers, lambda layer, x, past: layer.prefill(x, past), x, state)
        return self.norm(x), state

    def step(
        self, x_t: Float[Tensor, "B D"], state: State | None = None
    ) -> tuple[Float[Tensor, "B D"], State]:
        r"""Compute one position after those that `state` remembers."""
        x_t, state = _through(self.layers, lambda layer, x, past: layer.step(x, past), x_t, state)
        return self.norm(x_t), state


class Decoder(nn.Module):
    r"""`n_layers` layers that read their own past and a memory, and a final norm.

    Source: [vaswani2017], Section 3.1. Deviation: pre-norm layers, hence the final norm.

    Raises:
        ValueError: `layer` has no `src_attn`.
    """

    def __init__(self, layer: TransformerLayer, n_layers: int):
        super().__init__()
        if layer.src_attn is None:
            raise ValueError(
                "a decoder's layer needs src_attn to read the memory; without one use CausalStack"
            )
        self.d_model = layer.d_model
        self.layers = clone_layers(layer, n_layers)
        self.norm = nn.LayerNorm(layer.d_model)

    def forward(
        self,
        x: Float[Tensor, "T B D"],
        memory: Float[Tensor, "S B D"],
        src_mask: MaskLike = None,
        tgt_mask: MaskLike = None,
    ) -> Float[Tensor, "T B D"]:
        r"""Compute all positions; `src_mask` is for the memory, `tgt_mask` hides more than the future."""
        mask = _causal(tgt_mask)
        for layer in self.layers:
            x = layer(x=x, mask=mask, src=memory, src_mask=src_mask)
        return self.norm(x)

    # The memory is handed in at each step rather than kept in the state: it does not change, and whoever
    # decodes several sentences at once already holds it.
    def prefill(
        self,
        x: Float[Tensor, "T B D"],
        memory: Float[Tensor, "S B D"],
        src_mask: MaskLike = None,
        state: State | None = None,
    ) -> tuple[Float[Tensor, "T B D"], State]:
        r"""Compute a chunk after the positions that `state` remembers."""

        def advance(layer: Any, x: Tensor, past: State | None) -> tuple[Tensor, State]:
            return layer.prefill(x, past, src=memory, src_mask=src_mask)

        x, state = _through(self.layers, advance, x, state)
        return self.norm(x), state

    def step(
        self,
        x_t: Float[Tensor, "B D"],
        memory: Float[Tensor, "S B D"],
        src_mask: MaskLike = None,
        state: State | None = None,
    ) -> tuple[Float[Tensor, "B D"], State]:
        r"""Compute one position after those that `state` remembers."""

        def advance(layer: Any, x: Tensor, past: State | None) -> tuple[Tensor, State]:
            return layer.step(x, past, src=memory, src_mask=src_mask)

        x_t, state = _through(self.layers, advance, x_t, state)
        return self.norm(x_t), state


# Logits, not their log-softmax: the loss takes the two together in one stable step, and a sampler wants to
# divide by a temperature first.
class Generator(nn.Module):
    r"""The output layer: a logit for each token of the vocabulary.

    Source: [vaswani2017], Section 3.4. Deviation: has a bias; stops before the softmax.

    Cost: $D V$ multiplications and $V$ numbers a position, for a vocabulary of $V$: often the largest
    tensor of a model.
    """

    def __init__(self, n_vocab: int, d_model: int):
        super().__init__()
        check_sizes(n_vocab=n_vocab, d_model=d_model)
        self.projection = nn.Linear(d_model, n_vocab)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        r"""Compute the logits of every position."""
        return self.projection(x)


class EncoderDecoder(nn.Module):
    r"""The model of [vaswani2017]: an encoder reads one sequence, a decoder writes another.

    `forward` gives the decoder's output, not logits: `model.generator(...)` then makes them for the
    positions that are wanted, which in decoding is the last one.

    Source: [vaswani2017], Figure 1.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        src_embed: nn.Module,
        tgt_embed: nn.Module,
        generator: nn.Module,
    ):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.src_embed = src_embed
        self.tgt_embed = tgt_embed
        self.generator = generator

    def forward(
        self,
        src: Int[Tensor, "S B"],
        tgt: Int[Tensor, "T B"],
        src_mask: MaskLike = None,
        tgt_mask: MaskLike = None,
    ) -> Float[Tensor, "T B D"]:
        r"""Encode `src`, then decode `tgt`; position `t` reads `tgt` up to and including `t`."""
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def encode(self, src: Int[Tensor, "S B"], src_mask: MaskLike = None) -> Float[Tensor, "S B D"]:
        r"""Compute the memory."""
        return self.encoder(self.src_embed(src), src_mask)

    def decode(
        self,
        memory: Float[Tensor, "S B D"],
        src_mask: MaskLike,
        tgt: Int[Tensor, "T B"],
        tgt_mask: MaskLike = None,
    ) -> Float[Tensor, "T B D"]:
        r"""Compute the decoder's output for a known target."""
        return self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)


def _causal(mask: MaskLike) -> Mask:
    return replace(as_mask(mask), causal=True)


def _through(
    layers: nn.ModuleList,
    advance: Callable[[Any, Tensor, State | None], tuple[Tensor, State]],
    x: Tensor,
    state: State | None,
) -> tuple[Tensor, State]:
    pasts = (None,) * len(layers) if state is None else state
    if len(pasts) != len(layers):
        raise ValueError(f"the state is of {len(pasts)} layers, this stack has {len(layers)}")
    presents = []
    for layer, past in zip(layers, pasts, strict=True):
        x, present = advance(layer, x, past)
        presents.append(present)
    return x, tuple(presents)

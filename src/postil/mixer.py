r"""The protocol every mixer fulfils.

A **mixer** is the part of a transformer layer that lets positions exchange information: attention, or
something that stands in for it. Everything else in a layer treats each position alone. If all mixers are
called alike, any of them drops into any layer, and one set of tests (`tests/test_laws.py`) can hold them
all to the same laws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from postil.masks import MaskLike

__all__ = [
    "Backbone",
    "BatchFirst",
    "CausalMixer",
    "Mixer",
    "State",
    "check_heads",
    "check_probability",
    "check_sizes",
]

# Each mixer has a NamedTuple of its own and takes no other.
State: TypeAlias = Any
"""What decoding must remember: a NamedTuple of tensors, handed in and handed back, never kept on a module."""


class Mixer(nn.Module, ABC):
    r"""A module that computes each position of `query` from the positions of `key` and `value`.

    `forward` takes keywords only. Self-attention passes one tensor three times; cross-attention passes
    the encoder's output as `key` and `value`, of a length of its own.
    """

    d_model: int

    @abstractmethod
    def forward(
        self,
        *,
        query: Float[Tensor, "T B D"],
        key: Float[Tensor, "S B D"],
        value: Float[Tensor, "S B D"],
        mask: MaskLike = None,
    ) -> Float[Tensor, "T B D"]:
        r"""Mix; `mask` says which query may read which key (`None`: every query reads every key)."""

    @abstractmethod
    def reset_parameters(self) -> None:
        r"""Draw the parameters this module owns anew, so that copies of a layer start independent."""


# Decoding computes one position at a time. What the earlier positions leave behind is the state: for
# attention all keys and values so far, for a recurrence a few running sums.
class CausalMixer(Mixer):
    r"""A mixer whose causal form can be decoded token by token.

    For every cut of a sequence, `prefill` of the first part followed by `prefill` or `step` of the rest
    gives the rows of `forward(query=x, key=x, value=x, mask=Mask(causal=True))`.
    """

    @abstractmethod
    def prefill(self, x: Float[Tensor, "T B D"], state: State = None) -> tuple[Float[Tensor, "T B D"], State]:
        r"""Mix a chunk causally after what `state` remembers (`None`: nothing); give the new state."""

    def step(self, x_t: Float[Tensor, "B D"], state: State = None) -> tuple[Float[Tensor, "B D"], State]:
        r"""Mix one position: `prefill` of a chunk of one, unless a mixer knows something cheaper."""
        y, state = self.prefill(x_t[None], state)
        return y[0], state


# The Feedback Transformer cannot be cut into independent layers: each layer reads what all layers wrote at
# earlier positions. So the language model asks for this smaller thing, which a stack of layers fulfils too.
@runtime_checkable
class Backbone(Protocol):
    r"""All layers between the embedding and the logits, always causal, decoded like a mixer."""

    d_model: int

    def __call__(self, x: Float[Tensor, "T B D"], mask: MaskLike = None) -> Float[Tensor, "T B D"]:
        r"""Compute all positions; `mask=None` means causal."""
        ...

    def prefill(self, x: Float[Tensor, "T B D"], state: State = None) -> tuple[Float[Tensor, "T B D"], State]:
        r"""Compute a chunk after what `state` remembers."""
        ...

    def step(self, x_t: Float[Tensor, "B D"], state: State = None) -> tuple[Float[Tensor, "B D"], State]:
        r"""Compute one position."""
        ...


class BatchFirst(nn.Module):
    r"""Wrap a module so that its sequences are `[B, T, D]` instead of `[T, B, D]`; masks keep their axes."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(
        self, *sequences: Float[Tensor, "B _ D"], mask: MaskLike = None, **named: Float[Tensor, "B _ D"]
    ) -> Float[Tensor, "B T D"]:
        r"""Transpose every sequence, call the module, transpose back."""
        y = self.module(
            *(x.transpose(0, 1) for x in sequences),
            mask=mask,
            **{name: x.transpose(0, 1) for name, x in named.items()},
        )
        return y.transpose(0, 1)


# Bad sizes are refused where they are given, with both numbers, not three calls deeper by a reshape.
def check_sizes(**sizes: int) -> None:
    r"""Check that sizes are positive whole numbers.

    Raises:
        ValueError: naming the size and its value.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r}: expected a whole number of at least 1")


def check_probability(**probabilities: float) -> None:
    r"""Check that dropout probabilities lie in $[0, 1)$.

    Raises:
        ValueError: naming the probability and its value.
    """
    for name, probability in probabilities.items():
        if not 0.0 <= probability < 1.0:
            raise ValueError(f"{name}={probability!r}: expected a probability of at least 0 and below 1")


def check_heads(d_model: int, heads: int) -> None:
    r"""Check that heads share a width evenly.

    Raises:
        ValueError: naming both.
    """
    if d_model % heads:
        raise ValueError(
            f"d_model={d_model} must be divisible by heads={heads}: every head gets an equal share"
        )

r"""The feed-forward network: what a layer does with each position alone.

A mixer moves information between positions; this network then works on every position by itself, with the
same weights everywhere. It holds about two thirds of a layer's parameters. [vaswani2017] use two linear
maps with a ReLU between them:

$$\operatorname{FFN}(x) = f(x W_1 + b_1)\, W_2 + b_2, \qquad f(u) = \max(0, u) \tag{1}$$

[shazeer2020] multiplies the hidden layer by a second, linear view of the same input, a gate:

$$\operatorname{FFN}_{\text{gated}}(x) = \bigl(f(x W_1) \odot x V\bigr)\, W_2 \tag{2}$$

| kind | form | $f(u)$ |
| --- | --- | --- |
| `relu` | (1) | $\max(0, u)$ |
| `gelu` | (1) | $u\,\Phi(u)$, with $\Phi$ the normal distribution function |
| `glu` | (2) | $\sigma(u) = 1/(1 + e^{-u})$ |
| `bilinear` | (2) | $u$ |
| `reglu` | (2) | $\max(0, u)$ |
| `geglu` | (2) | $u\,\Phi(u)$ |
| `swiglu` | (2) | $u\,\sigma(u)$ |
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from postil.mixer import check_probability, check_sizes

__all__ = ["FEED_FORWARDS", "FeedForward", "GatedFeedForward", "feed_forward"]

Activation: TypeAlias = Callable[[Tensor], Tensor]


# Which of the maps carry a bias differs between papers and between published checkpoints. They are given
# by the names the maps have in a state dict, so a checkpoint's keys say directly what to write here.
class FeedForward(nn.Module):
    r"""Two linear maps with an activation between them, Eq. (1).

    `activation` is any function of a tensor, or a module. `biases` names the maps that have a bias.

    Source: [vaswani2017], Eq. 2. Deviation: dropout on the hidden layer, which the paper does not mention.

    Cost: $2 D d_{ff}$ multiplications a position; $d_{ff}$ numbers a position are kept for the gradient.

    Raises:
        ValueError: a size, the dropout probability or a name in `biases` is not possible.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout_prob: float = 0.1,
        activation: Activation = F.relu,
        *,
        biases: Collection[str] = ("layer1", "layer2"),
    ):
        super().__init__()
        _check(d_model, d_ff, dropout_prob, biases, ("layer1", "layer2"))
        self.layer1 = nn.Linear(d_model, d_ff, bias="layer1" in biases)
        self.layer2 = nn.Linear(d_ff, d_model, bias="layer2" in biases)
        self.activation = activation
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        r"""Compute every position alone."""
        return self.layer2(self.dropout(self.activation(self.layer1(x))))


# A third matrix makes the network half as large again. The paper compares at equal size: it shrinks
# $d_{ff}$ to two thirds. Nothing here does that unasked, because a width given should be the width had.
class GatedFeedForward(nn.Module):
    r"""A hidden layer multiplied by a linear gate, Eq. (2).

    `activation` is any function of a tensor, or a module; which one makes which variant stands in the table
    above. `biases` names the maps that have a bias, of `layer1`, `layer2`, `linear_v`: by default none.

    Source: [shazeer2020], Eq. 6. Deviation: dropout on the hidden layer, where the paper has none in
    pre-training.

    Cost: $3 D d_{ff}$ multiplications a position.

    Raises:
        ValueError: a size, the dropout probability or a name in `biases` is not possible.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout_prob: float = 0.1,
        activation: Activation = F.silu,
        *,
        biases: Collection[str] = (),
    ):
        super().__init__()
        _check(d_model, d_ff, dropout_prob, biases, ("layer1", "layer2", "linear_v"))
        self.layer1 = nn.Linear(d_model, d_ff, bias="layer1" in biases)
        self.linear_v = nn.Linear(d_model, d_ff, bias="linear_v" in biases)
        self.layer2 = nn.Linear(d_ff, d_model, bias="layer2" in biases)
        self.activation = activation
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        r"""Compute every position alone."""
        return self.layer2(self.dropout(self.activation(self.layer1(x)) * self.linear_v(x)))


# With $f(u) = u$ the hidden layer is a product of two linear maps, a quadratic form of the input. It is
# not linear, although no activation is in sight.
def identity(u: Tensor) -> Tensor:
    r"""Return `u`: the activation of the bilinear variant."""
    return u


FEED_FORWARDS: dict[str, tuple[type[FeedForward] | type[GatedFeedForward], Activation]] = {
    "relu": (FeedForward, F.relu),
    "gelu": (FeedForward, F.gelu),
    "glu": (GatedFeedForward, torch.sigmoid),
    "bilinear": (GatedFeedForward, identity),
    "reglu": (GatedFeedForward, F.relu),
    "geglu": (GatedFeedForward, F.gelu),
    "swiglu": (GatedFeedForward, F.silu),
}
"""The kinds of the table above, by name, for run configurations and command lines."""


def feed_forward(
    kind: str, d_model: int, d_ff: int, dropout_prob: float = 0.1
) -> FeedForward | GatedFeedForward:
    r"""Build a feed-forward network by the name of its kind, with the biases of its paper.

    Raises:
        ValueError: there is no such kind; the message lists those there are.
    """
    if kind not in FEED_FORWARDS:
        raise ValueError(f"feed-forward kind {kind!r} is unknown; there are {', '.join(FEED_FORWARDS)}")
    form, activation = FEED_FORWARDS[kind]
    return form(d_model, d_ff, dropout_prob, activation)


def _check(
    d_model: int, d_ff: int, dropout_prob: float, biases: Collection[str], maps: tuple[str, ...]
) -> None:
    check_sizes(d_model=d_model, d_ff=d_ff)
    check_probability(dropout_prob=dropout_prob)
    # A lone string is caught too: it is a collection of letters, none of which is the name of a map.
    if set(biases) - set(maps):
        raise ValueError(f"biases={biases!r}: expected a collection of names from {', '.join(maps)}")

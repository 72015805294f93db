r"""AFT-full: attention without attention.

Attention compares every query with every key. Suppose we keep the two things it is good for, a weighted mean
over all positions and weights that depend on content *and* place, but drop the comparison. Let each key say
for itself how much it wants to be read, channel by channel, and let a learned table say how much position $t$
wants to read position $s$:

$$Y_t = \sigma(Q_t) \odot
\frac{\sum_{s=1}^{T} \exp(K_s + w_{t,s}) \odot V_s}{\sum_{s=1}^{T} \exp(K_s + w_{t,s})} \tag{1}$$

The query no longer chooses whom to read, it only gates what comes back. In return there are no $T \times T$
scores for each head and each sequence of a batch: the only table, $w$, is shared by all, and memory is $T D$.
Each channel acts like a head of its own.

A causal model stops both sums at $s = t$.

:paper: zhai2021
:terms:
    Q: q
    K: k
    V: v
    w: w, pos_bias
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from postil.masks import Mask, MaskLike, dense_mask
from postil.mixer import check_sizes
from postil.mixers.aft.gated_mean import Reach, gated_mean
from postil.mixers.aft.layer import AFTLayer, check_length, hide_keys
from postil.mixers.aft.log_space import log_space_mean

__all__ = ["AFTFull", "FullState", "aft_full", "aft_full_reference"]


# ## The equation, literally
#
# The quotient in equation (1) is a mean under a softmax over $s$, one softmax for each channel. Written so,
# it is stable, and a row that may read nothing can be set to zero before it poisons a gradient.
def aft_full_reference(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B D"],
    v: Float[Tensor, "S B D"],
    w: Float[Tensor, "T S"],
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""Equation (1), with all weights written out.

    Source: [zhai2021], Eq. 2. Cost: $T S B D$ time and memory.
    """
    logits = k[None] + w[:, :, None, None]
    allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device)[..., None]
    empty = ~allowed.any(dim=1, keepdim=True)
    weights = logits.masked_fill(~(allowed | empty), -torch.inf).softmax(dim=1).masked_fill(empty, 0.0)
    return torch.sigmoid(q) * torch.einsum("tsbd,sbd->tbd", weights, v)


# ## The fast form
#
# The weight of a pair is a product, $e^{K_s + w_{t,s}} = e^{w_{t,s}} \cdot e^{K_s}$, of something that does
# not know the channel and something that does not know the query. So both sums are matrix products:
#
# $$N = e^{w}\,(e^{K} \odot V), \qquad D = e^{w}\, e^{K}, \qquad Y = \sigma(Q) \odot N / D$$
#
# and the table of $T \cdot S$ weights *in every channel*, which the literal form builds, never exists. The
# exponentials overflow, of course; `walk` tells how to keep them in range without looking into the future.
def aft_full(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B D"],
    v: Float[Tensor, "S B D"],
    w: Float[Tensor, "T S"],
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""Equation (1) as matrix products.

    For each block of rows, $[D, N] = e^{w - \max w}\,[e^{k - m}, e^{k - m} v]$ over the keys up to its end,
    $m$ the largest key before the block; then $y = \sigma(q)\, N / D$.

    Cost: $T S B D$ time, half if causal; $T B D$ memory. A dense mask takes the general form, slower by far.
    """
    k, v = hide_keys(k, v, mask)
    k3, v4 = k.flatten(1)[..., None], v.flatten(1)[..., None, None]
    if mask.dense is not None:
        allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device)
        return torch.sigmoid(q) * log_space_mean(k3, v4, w[None], allowed).view(q.shape)
    if mask.window is not None:
        near = dense_mask(Mask(window=mask.window, offset=mask.offset), q.shape[0], k.shape[0], w.device)
        w = w.masked_fill(~near[..., 0], -math.inf)
    reach = Reach(mask.offset, 0, mask.offset, causal=mask.causal, far=False, pairs=True)
    return gated_mean(q.flatten(1)[..., None, None], k3, v4, w[None, None], reach).view(q.shape)


# ## The state
#
# Here nothing can be summed up: every query weighs the whole past anew. The state is what attention keeps.
class FullState(NamedTuple):
    r"""All keys and values so far."""

    keys: Float[Tensor, "S B D"]
    values: Float[Tensor, "S B D"]


# ## The module
class AFTFull(AFTLayer):
    r"""AFT-full with its four projections and a table of position biases.

    With `factors` the table is a product of two thin ones, $w = u\, v^\top$ with $u, v \in
    \mathbb{R}^{T \times \mathrm{factors}}$: fewer numbers to learn, and smoother ones.

    Source: [zhai2021], Eq. 2 and Section 3.1. Deviation: biases start at zero; of the two factors one starts
    at zero, the other is drawn from $\mathcal{N}(0, 0.01)$, since two zeros would never move.

    Raises:
        ValueError: a size is not a positive whole number.
    """

    def __init__(self, d_model: int, seq_len: int, bias: bool = True, *, factors: int | None = None):
        super().__init__(d_model, bias)
        check_sizes(seq_len=seq_len, factors=1 if factors is None else factors)
        self.seq_len = seq_len
        self.factors = factors
        if factors is None:
            self.pos_bias = nn.Parameter(torch.empty(seq_len, seq_len))
        else:
            self.query_factors = nn.Parameter(torch.empty(seq_len, factors))
            self.key_factors = nn.Parameter(torch.empty(seq_len, factors))
        self._reset_biases()

    @property
    def max_len(self) -> int:
        r"""Longest text the position biases are made for."""
        return self.seq_len

    def reset_parameters(self) -> None:
        r"""Draw the projections and biases anew."""
        super().reset_parameters()
        self._reset_biases()

    def _reset_biases(self) -> None:
        if self.factors is None:
            nn.init.zeros_(self.pos_bias)
        else:
            nn.init.normal_(self.query_factors, std=0.1)
            nn.init.zeros_(self.key_factors)

    def position_biases(self, queries: int, keys: int, offset: int = 0) -> Float[Tensor, "T S"]:
        r"""Give $w$ for queries from `offset` on and keys from the beginning.

        Raises:
            ValueError: a position lies beyond the table; both lengths are named.
        """
        check_length(offset + queries, self.seq_len)
        check_length(keys, self.seq_len, "key")
        if self.factors is None:
            return self.pos_bias[offset : offset + queries, :keys]
        return self.query_factors[offset : offset + queries] @ self.key_factors[:keys].t()

    def operands(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: MaskLike = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Mask]:
        r"""Check, hide padding, project: the arguments of `aft_full` and `aft_full_reference`."""
        q, k, v, rules = self.project(query, key, value, mask)
        return q, k, v, self.position_biases(q.shape[0], k.shape[0], rules.offset), rules

    def mix(self, *operands: Any) -> Tensor:
        r"""Compute `aft_full`."""
        return aft_full(*operands)

    def prefill(
        self, x: Float[Tensor, "T B D"], state: FullState | None = None
    ) -> tuple[Float[Tensor, "T B D"], FullState]:
        r"""Mix a chunk causally after what `state` remembers.

        Cost: $T S B D$ time for $S$ positions so far; the state holds $2 S B D$ numbers.
        """
        q, k, v, _ = self.project(x, x, x, None)
        if state is not None:
            k, v = torch.cat([state.keys, k]), torch.cat([state.values, v])
        past = k.shape[0] - q.shape[0]
        w = self.position_biases(q.shape[0], k.shape[0], past)
        y = self.output(aft_full(q, k, v, w, Mask(causal=True, offset=past)))
        return y, FullState(k, v)

    # For one query the weights of equation (1) are as many numbers as the keys that the state keeps anyway.
    # So the literal form is good enough, and takes less time than the fast one of a single row.
    def step(
        self, x_t: Float[Tensor, "B D"], state: FullState | None = None
    ) -> tuple[Float[Tensor, "B D"], FullState]:
        r"""Mix one position. Cost: $S B D$ time and memory for $S$ positions so far."""
        q, k, v = self.query(x_t), self.key(x_t)[None], self.value(x_t)[None]
        if state is not None:
            k, v = torch.cat([state.keys, k]), torch.cat([state.values, v])
        w = self.position_biases(1, k.shape[0], k.shape[0] - 1)[0]
        wide = torch.promote_types(k.dtype, torch.float32)
        weights = (k.to(wide) + w.to(wide)[:, None, None]).softmax(dim=0)
        mean = (weights * v).sum(dim=0)
        return self.output(torch.sigmoid(q) * mean.to(q.dtype)), FullState(k, v)

r"""What a text leaves behind: the states of the family.

To go on from position $t$, a member needs its near keys one by one, since their biases differ for every query
to come. Of all keys before it needs only sums,

$$d = \sum_j e^{k_j - p}, \qquad n = \sum_j e^{k_j - p}\, v_j, \qquad p = \max_j k_j$$

so a state does not grow with the text.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Sums", "WindowState"]


# The sums grow as long as the text, and a number added to a much larger one is lost: in bfloat16 the count of
# equal keys would stop at 256. So they are kept in float64, and they are few.
class Sums(NamedTuple):
    r"""All keys and values so far, summed up relative to the largest key `peak` ($-\infty$: nothing yet)."""

    peak: Float[Tensor, "B K"]
    den: Float[Tensor, "B K"]
    num: Float[Tensor, "B K *E"]

    @staticmethod
    def empty(k: Float[Tensor, "T B K"], v: Float[Tensor, "T B K *E"]) -> Sums:
        r"""Sums of nothing, for keys and values like `k` and `v`."""
        den = k.new_zeros(k.shape[1:], dtype=torch.float64)
        return Sums(den - math.inf, den, v.new_zeros(v.shape[1:], dtype=torch.float64))

    def plus(self, k: Float[Tensor, "T B K"], v: Float[Tensor, "T B K *E"]) -> Sums:
        r"""Sums of more keys and values; these stay as they are."""
        if k.shape[0] == 0:
            return self
        peak = torch.maximum(self.peak, k.double().amax(0))
        base = peak.masked_fill(peak == -math.inf, 0.0)
        weights, shrink = torch.exp(k.double() - base), torch.exp(self.peak - base)
        num = (_over(weights, v) * v).sum(0) + _over(shrink, self.num) * self.num
        return Sums(peak, shrink * self.den + weights.sum(0), num)

    # A chunk that continues a text can treat everything far before it as one key: the exponential of that key
    # is the denominator's sum, its value is their mean. So it is computed like any other chunk.
    def as_key(self, dtype: torch.dtype) -> tuple[Float[Tensor, "1 B K"], Float[Tensor, "1 B K *E"]]:
        r"""Give one key and one value that weigh as much as all that was summed."""
        value = self.num / _over(self.den.masked_fill(self.den == 0, 1.0), self.num)
        return (self.peak + self.den.log())[None].to(dtype), value[None].to(dtype)


def _over(weights: Tensor, values: Tensor) -> Tensor:
    return weights[..., None] if values.dim() > weights.dim() else weights


# Near keys are kept as they are, not as exponentials: so a step can take the maximum over just what it reads.
class WindowState(NamedTuple):
    r"""The last keys and values, the sums of all before them, and the number of positions so far.

    Keys before the first position are $-\infty$.
    """

    keys: Float[Tensor, "near B K"]
    values: Float[Tensor, "near B K *E"]
    far: Sums
    position: int

    @staticmethod
    def empty(k: Float[Tensor, "T B K"], v: Float[Tensor, "T B K *E"], near: int) -> WindowState:
        r"""State before the first position, for keys and values like `k` and `v`."""
        keys, values = k.new_full((near, *k.shape[1:]), -math.inf), v.new_zeros(near, *v.shape[1:])
        return WindowState(keys, values, Sums.empty(k, v), 0)

    def extend(self, k: Tensor, v: Tensor, near: int) -> WindowState:
        r"""State after more keys and values, the last `near` of which stay near; this one stays as it is."""
        keys, values = torch.cat([self.keys, k]), torch.cat([self.values, v])
        gone = keys.shape[0] - near
        far = self.far.plus(keys[:gone], values[:gone])
        return WindowState(keys[gone:], values[gone:], far, self.position + k.shape[0])

    def prepend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        r"""Put what this state remembers before more keys and values: all far ones as one, then the near."""
        wide = torch.promote_types(k.dtype, torch.float32)
        key, value = self.far.as_key(wide)
        return torch.cat([key, self.keys, k]), torch.cat([value, self.values, v])

    # The equation, term by term, for one query that reads everything so far.
    def read(self, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        r"""Mean of all values so far and `v`, with biases for the near keys and `k`; the far ones have 0."""
        logits = torch.cat([self.keys, k[None]]).double() + bias
        top = torch.maximum(logits.amax(0), self.far.peak)
        near, far = torch.exp(logits - top), torch.exp(self.far.peak - top)
        values = torch.cat([self.values, v[None]])
        num = (_over(near, values) * values).sum(0) + _over(far, self.far.num) * self.far.num
        return num / _over(near.sum(0) + far * self.far.den, num)

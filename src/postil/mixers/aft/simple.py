r"""AFT-simple: no positions at all.

What is left of the family's equation when the position biases are taken away? Each channel averages its
values under a softmax of its keys over time, the same average for every query that reads the same keys; the
query only opens or closes the gate:

$$Y_t = \sigma(Q_t) \odot \sum_s \mathrm{softmax}(K)_s \odot V_s \tag{1}$$

It is the cheapest member, $T D$ operations, and a good first look at what makes all of them numerically
delicate: the softmax runs over time, so for a causal model its normaliser grows while it is read.

:paper: zhai2021
:terms:
    Q: q
    K: k
    V: v
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from postil.masks import Mask, MaskLike, dense_mask
from postil.mixers.aft.layer import AFTLayer
from postil.mixers.aft.local import aft_local
from postil.mixers.aft.sums import Sums

__all__ = ["AFTSimple", "aft_simple", "aft_simple_reference"]


# ## The equation, literally
#
# Under a mask each query has a softmax of its own, over the keys it may read.
def aft_simple_reference(
    q: Float[Tensor, "T B D"], k: Float[Tensor, "S B D"], v: Float[Tensor, "S B D"], mask: Mask
) -> Float[Tensor, "T B D"]:
    r"""Equation (1).

    Source: [zhai2021], Section 3.2. Cost: $T S B D$ time and memory.
    """
    allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device)[..., None]
    empty = ~allowed.any(dim=1, keepdim=True)
    weights = k[None].masked_fill(~(allowed | empty), -torch.inf).softmax(dim=1).masked_fill(empty, 0.0)
    return torch.sigmoid(q) * torch.einsum("tsbd,sbd->tbd", weights.expand(q.shape[0], *k.shape), v)


# ## The fast form
#
# If every query reads everything, the mean is computed once. If not, this is AFT-local with a window of one
# position and the bias 0 in it: all keys are far, and the mean is a quotient of two running sums.
def aft_simple(
    q: Float[Tensor, "T B D"], k: Float[Tensor, "S B D"], v: Float[Tensor, "S B D"], mask: Mask
) -> Float[Tensor, "T B D"]:
    r"""Equation (1) by running sums: AFT-local with $w = 0$.

    $\sum_{s \le t} e^{k_s - m} v_s$ is a triangle of ones times the block's rows, plus the sum of all blocks
    before; the same without $v$; $y = \sigma(q)\, N / D$.

    Cost: $T B D$ time and memory. A dense mask takes the general form, $T S B D$ time.
    """
    if mask.is_full:
        return torch.sigmoid(q) * (k.softmax(dim=0) * v).sum(dim=0)
    return aft_local(q, k, v, k.new_zeros(mask.offset + q.shape[0], 1), mask)


# ## The module
#
# Its state is the smallest a sequence model can have: two sums, and the maximum they are relative to.
class AFTSimple(AFTLayer):
    r"""AFT-simple with its four projections.

    Source: [zhai2021], Section 3.2. Deviation: none.

    Raises:
        ValueError: `d_model` is not a positive whole number.
    """

    def operands(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: MaskLike = None
    ) -> tuple[Tensor, Tensor, Tensor, Mask]:
        r"""Check, hide padding, project: the arguments of `aft_simple` and `aft_simple_reference`."""
        return self.project(query, key, value, mask)

    def mix(self, *operands: Any) -> Tensor:
        r"""Compute `aft_simple`."""
        return aft_simple(*operands)

    def prefill(
        self, x: Float[Tensor, "T B D"], state: Sums | None = None
    ) -> tuple[Float[Tensor, "T B D"], Sums]:
        r"""Mix a chunk causally after what `state` remembers. Cost: $T B D$ time, $3 B D$ numbers."""
        q, k, v, _ = self.operands(query=x, key=x, value=x, mask=Mask(causal=True))
        state = Sums.empty(k, v) if state is None else state
        key, value = state.as_key(torch.promote_types(k.dtype, torch.float32))
        y = aft_simple(q, torch.cat([key, k]), torch.cat([value, v]), Mask(causal=True, offset=1))
        return self.output(y), state.plus(k, v)

    def step(self, x_t: Float[Tensor, "B D"], state: Sums | None = None) -> tuple[Float[Tensor, "B D"], Sums]:
        r"""Mix one position. Cost: $B D$ time, however long the text."""
        q, k, v = self.query(x_t), self.key(x_t)[None], self.value(x_t)[None]
        state = (Sums.empty(k, v) if state is None else state).plus(k, v)
        return self.output(torch.sigmoid(q) * (state.num / state.den).to(q.dtype)), state

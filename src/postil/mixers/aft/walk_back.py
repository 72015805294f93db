r"""Walking back: from the gradients of queries to those of keys.

With $y = \sigma(q)\, N / D$ everything follows from what the forward walk leaves behind:

$$\frac{\partial}{\partial N} = \frac{g\,\sigma(q)}{D}, \qquad
\frac{\partial}{\partial D} = -\frac{g\,y}{D}$$

These two take the place of values and keys, the transposed weights take the place of the weights, and later
queries that of earlier keys. So the walk runs down the sequence with the same buffer, the same product and
the same sums; no exponential was stored, they are made again chunk by chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from postil.mixers.aft.walk import TINY, Buffer, Reach, after, before, chunk_rows, columns, fill, near_product

__all__ = ["Gradients", "Outcome", "pull"]


class Outcome(NamedTuple):
    r"""What the forward walk computed at each query, and the gradient `g` that arrived there."""

    g: Tensor
    q: Tensor
    y: Tensor
    den: Tensor


class Gradients(NamedTuple):
    r"""Where the gradients go: three are written, that of the near weights is added to (if wanted)."""

    q: Tensor
    k: Tensor
    v: Tensor
    near: Tensor | None


def pull(
    rows: Outcome,
    k: Tensor,
    v: Tensor,
    references: Tensor,
    near: Tensor,
    beyond: Tensor,
    reach: Reach,
    into: Gradients,
) -> None:
    r"""Compute the gradients of `push` from its results and its `references`, one a chunk of queries."""
    c, length, overlap = near.shape[2], rows.q.shape[0], reach.left + reach.right
    height = chunk_rows(c, reach)
    side = _KeySide(near, beyond, reach, length)
    buffer = Buffer(v, height, overlap, near.dtype)
    base = torch.zeros_like(buffer.data[:, 0])
    stop = length if reach.causal else max(length, k.shape[0] - reach.start)
    chunks = range(-reach.start // height, -(-stop // height))
    earlier = None if reach.causal or not reach.far else _earlier(rows, side, buffer, chunks)
    m = references[-1]
    for chunk in reversed(chunks):
        first = chunk * height - reach.right
        if chunk == chunks[-1]:
            _fill_rows(buffer, height, rows, first + height, overlap, into.q)
        else:
            buffer.carry_down()
        old, m = m, references[min(max(chunk, 0), len(references) - 1)]
        if reach.causal:
            factor = torch.exp(m - old)
            buffer.scale(factor, height, height + overlap)
            base *= columns(factor, v.shape[-1])
        _fill_rows(buffer, 0, rows, first, height, into.q)
        weights, index = side.near(chunk * height // c, height // c)
        tail = side.sums(buffer, overlap, first + overlap)
        far = after(base, tail)
        if earlier is not None:
            far += before(earlier[chunk - chunks[0]], side.sums(buffer, 0, first))
        out = near_product(weights, buffer).add_(far[:, :, None]).flatten(1, 2)
        base = base + tail.sum(1)
        at = reach.start + chunk * height
        keys = slice(min(max(0, at), k.shape[0]), min(max(0, at + height), k.shape[0]))
        source = Buffer(v, height, 0, near.dtype)
        fill(source, keys.start - at, k[keys], v[keys], m)
        _write_keys(source, out, keys.start - at, v[keys], into.k[keys], into.v[keys])
        if into.near is not None:
            side.add_near(into.near, index, source, buffer)


def _write_keys(source: Buffer, out: Tensor, at: int, v: Tensor, dk: Tensor, dv: Tensor) -> None:
    count, n, _, e = v.shape
    den = out[:, at : at + count, :n].permute(1, 2, 0)
    num = out[:, at : at + count, n:].unflatten(-1, (n, e)).permute(1, 2, 0, 3)
    weight = source.den(at, at + count)
    dv.copy_(weight[..., None] * num)
    dk.copy_((num * v).sum(-1).add_(den).mul_(weight))


# Rows whose denominator left the range of the fast form are redone in log space; here they count nothing.
def _fill_rows(buffer: Buffer, at: int, rows: Outcome, first: int, count: int, dq: Tensor | None) -> None:
    low, high = min(max(0, first), rows.q.shape[0]), min(max(0, first + count), rows.q.shape[0])
    buffer.clear(at, at + count)
    if high == low:
        return
    g, q, y, den = (x[low:high].to(buffer.data.dtype) for x in rows)
    at += low - first
    gate = torch.sigmoid(q)
    inverse = den.reciprocal().masked_fill_(den < TINY, 0.0)
    flow = g * y
    torch.mul(flow.sum(-1), inverse, out=buffer.den(at, at + high - low)).neg_()
    torch.mul(g * gate, inverse[..., None], out=buffer.num(at, at + high - low))
    if dq is not None:
        dq[low:high] = flow.mul_(1.0 - gate)


# ## The key's side of the weights
#
# Forward, a block of queries lists the keys it reads. Backward, a block of keys needs the queries that read
# it: the same numbers in another order. Query $r$ of that list lies `shift` blocks later than the keys, and
# the order is the same for every block but for this shift, so one table of indices serves them all.
class _KeySide:
    def __init__(self, near: Tensor, beyond: Tensor, reach: Reach, length: int):
        self.heads, self.count, self.c, k = near.shape
        self.flat = torch.cat([near, beyond], dim=3).flatten(1)
        blocks = -(-length // self.c)
        self.beyond = beyond.expand(-1, blocks, -1, -1).reshape(self.heads, blocks * self.c)
        query = torch.arange(k, device=near.device) - reach.right
        self.shift = query.div(self.c, rounding_mode="floor")
        column = torch.arange(self.c, device=near.device)[:, None] - self.shift * self.c + reach.left
        column = column.where((column >= 0) & (column < k), k)
        self.within = (query - self.shift * self.c) * (k + 1) + column
        self.block_size = self.c * (k + 1)
        self.right = reach.right

    def near(self, first: int, blocks: int) -> tuple[Tensor, Tensor]:
        r"""Weights `[H, blocks, C, K]` of the keys of some blocks, and where they stand in `flat`."""
        block = torch.arange(first, first + (1 if self.count == 1 else blocks), device=self.shift.device)
        block = (block[:, None, None] + self.shift).clamp(0, self.count - 1)
        index = block * self.block_size + self.within
        return self.flat[:, index].expand(-1, blocks, -1, -1), index

    def sums(self, buffer: Buffer, at: int, first: int) -> Tensor:
        r"""Sum rows of a buffer by blocks, each with its weight as a reader of far keys."""
        blocks = buffer.rows // self.c
        weights = buffer.data.new_zeros(self.heads, buffer.rows)
        low, high = (min(max(0, t), self.beyond.shape[1]) for t in (first, first + buffer.rows))
        weights[:, low - first : high - first] = self.beyond[:, low:high]
        weights = weights.view(self.heads, blocks, 1, self.c)
        rows = buffer.blocks(at, blocks, self.c)
        return torch.cat([torch.bmm(w, x).transpose(0, 1) for w, x in zip(weights, rows, strict=True)])

    def add_near(self, into: Tensor, index: Tensor, source: Buffer, buffer: Buffer) -> None:
        r"""Add the gradients of the near weights, products of key rows and query rows, where they stand."""
        blocks, height = buffer.rows // self.c, self.within.shape[1]
        for head in range(self.heads):
            queries = buffer.windows(head, blocks, self.c, height).transpose(1, 2)
            product = torch.bmm(source.blocks(0, blocks, self.c)[head], queries)
            if self.count == 1:
                product = product.sum(0, keepdim=True)
            into[head].index_add_(0, index.flatten(), product.flatten())


def _earlier(rows: Outcome, side: _KeySide, buffer: Buffer, chunks: range) -> list[Tensor]:
    total = torch.zeros_like(buffer.data[:, 0])
    sums = []
    for chunk in chunks:
        sums.append(total)
        first = chunk * buffer.rows - side.right
        _fill_rows(buffer, 0, rows, first, buffer.rows, None)
        total = total + side.sums(buffer, 0, first).sum(1)
    return sums

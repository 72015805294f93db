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

from postil.mixers.aft.walk import Buffer, Reach, after, before, fill, near_product, split

__all__ = ["Gradients", "KeySide", "Outcome", "fill_rows", "pull", "write_keys"]


class Outcome(NamedTuple):
    r"""What the forward walk computed at each query, and the gradient `g` that arrived there."""

    g: Tensor
    q: Tensor
    y: Tensor
    den: Tensor


class Gradients(NamedTuple):
    r"""Where the gradients of queries, keys and values are written."""

    q: Tensor
    k: Tensor
    v: Tensor


# ## The key's side of the weights
#
# Forward, a block of queries lists the keys it reads. Backward, a block of keys needs the queries that read
# it: the same numbers in another order. Query $r$ of that list lies `shift` blocks later than the keys, and
# the order is the same for every block but for this shift, so one small table of indices serves them all.
class KeySide:
    r"""The weights of `walk`, sorted by keys, and a place of the same shape for their gradients.

    `near` is `[H, blocks, C, K]`, for the blocks of keys from `first` on; or one block that serves all.
    """

    def __init__(self, near: Tensor, beyond: Tensor, reach: Reach, length: int, keys: int, rows: int):
        heads, self.count, self.c, k = near.shape
        self.rows = rows
        stop = length if reach.causal else max(length, keys - reach.start)
        self.chunks = range(-reach.start // rows, -(-stop // rows))
        self.first = self.chunks.start * rows // self.c
        blocks = len(self.chunks) * rows // self.c
        self.index = self._index(reach, 1 if self.count == 1 else blocks, k, near.device)
        self.near = torch.cat([near, beyond], dim=3).flatten(1)[:, self.index].expand(-1, blocks, -1, -1)
        # Transposed: a tall product runs nearly twice as fast as a flat one.
        self.gradient = near.new_zeros(heads, blocks, k, self.c)
        # Queries that do not exist weigh nothing.
        self.margin = reach.right - self.chunks.start * rows
        self.beyond = near.new_zeros(heads, self.margin + self.chunks.stop * rows + reach.left)
        each = beyond.expand(-1, -(-length // self.c), -1, -1).reshape(heads, -1)[:, :length]
        self.beyond[:, self.margin : self.margin + length] = each

    def _index(self, reach: Reach, blocks: int, k: int, device: torch.device) -> Tensor:
        query = torch.arange(k, device=device) - reach.right
        shift = query.div(self.c, rounding_mode="floor")
        column = torch.arange(self.c, device=device)[:, None] - shift * self.c + reach.left
        column = column.where((column >= 0) & (column < k), k)
        within = (query - shift * self.c) * (k + 1) + column
        block = torch.arange(self.first, self.first + blocks, device=device)[:, None, None] + shift
        return (block.clamp(0, self.count - 1) * (self.c * (k + 1)) + within).int()

    # A query that lists a pair as far passes its gradient on through the sums; here it is dropped.
    def sorted_by_query(self, near: Tensor) -> Tensor:
        r"""Give the gradient of the near weights in the order of `near`."""
        heads, _, c, k = near.shape
        gradient = self.gradient.sum(1, keepdim=True) if self.count == 1 else self.gradient
        flat = near.new_zeros(heads, self.count * c * (k + 1))
        flat.index_add_(1, self.index.flatten(), gradient.transpose(2, 3).flatten(1))
        return flat.view(heads, -1, c, k + 1)[..., :k]

    def sums(self, buffer: Buffer, at: int, query: int) -> Tensor:
        r"""Sum rows of a buffer by blocks, each with its weight as a reader of far keys."""
        blocks = buffer.rows // self.c
        weights = self.beyond[:, self.margin + query : self.margin + query + buffer.rows]
        weights, rows = weights.view(-1, blocks, 1, self.c), buffer.blocks(at, blocks, self.c)
        return torch.stack([torch.bmm(w, x)[:, 0] for w, x in zip(weights, rows, strict=True)])


# ## Down: from queries to keys
def pull(
    rows: Outcome, k: Tensor, v: Tensor, references: Tensor, into: Gradients, side: KeySide, reach: Reach
) -> None:
    r"""Compute the gradients of `push` from its results and its `references`, one a chunk of queries.

    Those of queries, keys and values are written `into` place, those of the near weights added to `side`.
    """
    height, overlap, c = side.rows, reach.left + reach.right, side.c
    blocks = height // c
    buffer = Buffer(v, height, overlap, side.near.dtype)
    source = Buffer(v, height, 0, side.near.dtype)
    base = torch.zeros_like(buffer.data[:, 0])
    earlier = None if reach.causal or not reach.far else _earlier(rows, side, buffer, reach)
    # Keys that come after every query are read by none.
    unread = reach.start + side.chunks.stop * height
    into.k[unread:], into.v[unread:] = 0.0, 0.0
    m = references[-1]
    for chunk in reversed(side.chunks):
        query, at = chunk * height - reach.right, reach.start + chunk * height
        if chunk == side.chunks[-1]:
            fill_rows(buffer, height, rows, query + height, overlap, into.q)
        else:
            buffer.carry_down()
        old, m = m, references[min(max(chunk, 0), len(references) - 1)]
        if reach.causal:
            base *= buffer.scale(torch.exp(m - old), height)
        fill_rows(buffer, 0, rows, query, height, into.q)
        tail = side.sums(buffer, overlap, query + overlap)
        far = after(base, tail)
        if earlier is not None:
            far += before(earlier[chunk - side.chunks[0]], side.sums(buffer, 0, query))
        first = chunk * blocks - side.first
        out = near_product(side.near[:, first : first + blocks], buffer).add_(far[:, :, None]).flatten(1, 2)
        base = base + tail.sum(1)
        keys = slice(min(max(0, at), k.shape[0]), min(max(0, at + height), k.shape[0]))
        _fill_source(source, keys.start - at, k[keys], v[keys], m)
        write_keys(source, out, keys.start - at, v[keys], into.k[keys], into.v[keys])
        for head, gradient in enumerate(side.gradient[:, first : first + blocks]):
            queries = buffer.windows(head, blocks, c, side.near.shape[3])
            gradient.baddbmm_(queries, source.blocks(0, blocks, c)[head].transpose(1, 2))


def _fill_source(source: Buffer, at: int, k: Tensor, v: Tensor, m: Tensor) -> None:
    source.clear(0, at)
    source.clear(at + k.shape[0], source.rows)
    fill(source, at, k, v, m)


def write_keys(source: Buffer, out: Tensor, at: int, v: Tensor, dk: Tensor, dv: Tensor) -> None:
    r"""Write the gradients of keys and values: what their readers sent back, times their own weights."""
    rows = slice(at, at + v.shape[0])
    den, num = (x[rows] for x in split(out, v.shape[1]))
    weight = source.den[rows]
    torch.mul(weight[..., None], num, out=dv)
    torch.mul(_sum_last(num.mul_(v)).add_(den), weight, out=dk)


def _sum_last(x: Tensor) -> Tensor:
    return x[..., 0] if x.shape[-1] == 1 else x.sum(-1)


def fill_rows(buffer: Buffer, at: int, rows: Outcome, query: int, count: int, dq: Tensor | None) -> None:
    r"""Write $\partial D$ and $\partial N$ of some queries into a buffer, and the queries' own gradients."""
    low, high = (min(max(0, t), rows.q.shape[0]) for t in (query, query + count))
    if high <= low:
        buffer.clear(at, at + count)
        return
    buffer.clear(at, at + low - query)
    buffer.clear(at + high - query, at + count)
    g, q, y, den = (x[low:high].to(buffer.data.dtype) for x in rows)
    place = slice(at + low - query, at + high - query)
    gate, flow = torch.sigmoid(q), g * y
    if dq is not None:
        torch.addcmul(flow, flow, gate, value=-1.0, out=dq[low:high])
    torch.div(_sum_last(flow), den, out=buffer.den[place]).neg_()
    torch.mul(g, gate, out=buffer.num[place]).div_(den[..., None])


def _earlier(rows: Outcome, side: KeySide, buffer: Buffer, reach: Reach) -> list[Tensor]:
    total = torch.zeros_like(buffer.data[:, 0])
    sums = []
    for chunk in side.chunks:
        sums.append(total)
        query = chunk * buffer.rows - reach.right
        fill_rows(buffer, 0, rows, query, buffer.rows, None)
        total = total + side.sums(buffer, 0, query).sum(1)
    return sums

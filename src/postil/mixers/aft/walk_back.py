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
import torch.nn.functional as F
from torch import Tensor

from postil.mixers.aft.walk import Buffer, Reach, add_near, after, before, fill, split

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
# Forward, a block of queries lists the keys around it. Backward, a block of keys needs the queries around
# it: the same pairs in another order. Item $j$ of a list lies `shift` blocks later, whatever the block, so
# one small table of places serves them all, and with both sides exchanged it also leads back.
def exchanged(c: int, k: int, start: int, other_start: int, device: torch.device) -> tuple[Tensor, ...]:
    r"""Find the pairs of a block's list in the lists of the other side.

    A list begins `start` before its block, one of the other side `other_start` before its own. For item $j$
    give the `shift` of its block and its row there, `[K]`; for row $i$ its item there, `[C, K]`, which does
    not exist outside of 0 to $K - 1$.
    """
    listed = torch.arange(k, device=device) - start
    shift = listed.div(c, rounding_mode="floor")
    return shift, listed - shift * c, torch.arange(c, device=device)[:, None] - shift * c + other_start


class KeySide:
    r"""The weights of `walk`, to be sorted by keys, and a place of the same size for their gradients.

    `near` `[H, blocks, C, K]` and `beyond` `[H, blocks, C, 1]` are sorted by queries; one block serves all.
    """

    def __init__(self, near: Tensor, beyond: Tensor, reach: Reach, length: int, keys: int, rows: int):
        heads, self.count, self.c, self.k = near.shape
        self.rows, self.reach = rows, reach
        stop = length if reach.causal else max(length, keys - reach.start)
        self.chunks = range(-reach.start // rows, -(-stop // rows))
        self.blocks = rows // self.c
        self.first = self.chunks.start * self.blocks
        # Transposed: a tall product runs nearly twice as fast as a flat one.
        self.gradient = near.new_zeros(heads, len(self.chunks) * self.blocks, self.k, self.c)
        self._sort(near, beyond)
        # Queries that do not exist weigh nothing.
        self.margin = reach.right - self.chunks.start * rows
        self.beyond = near.new_zeros(heads, self.margin + self.chunks.stop * rows + reach.left)
        each = beyond.expand(-1, -(-length // self.c), -1, -1).reshape(heads, -1)[:, :length]
        self.beyond[:, self.margin : self.margin + length] = each

    # A pair that its query does not list is far, and weighs what all its far pairs weigh: one column more.
    def _sort(self, near: Tensor, beyond: Tensor) -> None:
        shift, query, item = exchanged(self.c, self.k, self.reach.right, self.reach.left, near.device)
        item = item.where((item >= 0) & (item < self.k), self.k)
        self.weights = torch.cat([near, beyond], dim=3)
        block = torch.zeros_like(shift)
        if self.count > 1:
            first, last = self.first + int(shift[0]), self.first + len(self.gradient[0]) + int(shift[-1])
            self.weights = F.pad(self.weights, (0, 0, 0, 0, -first, last - self.count))
            block = torch.arange(self.blocks, device=near.device)[:, None, None] + shift - shift[0]
        self.index = ((block * self.c + query) * (self.k + 1) + item).view(-1, self.c, self.k)

    def near(self, chunk: int) -> Tensor:
        r"""Sort the weights of a chunk of keys by them, `[H, blocks, C, K]`."""
        first = 0 if self.count == 1 else (chunk - self.chunks.start) * self.blocks
        some = self.weights[:, first:].flatten(1).index_select(1, self.index.flatten())
        return some.view(-1, *self.index.shape).expand(-1, self.blocks, -1, -1)

    # A query that lists a pair as far passes its gradient on through the sums; here it is dropped.
    def bias_gradient(self, weights: Tensor) -> Tensor:
        r"""Turn `weights` as `near` into the gradient of the biases, in place."""
        shift, key, item = exchanged(self.c, self.k, self.reach.left, self.reach.right, weights.device)
        gradient = self.gradient.sum(1, keepdim=True) if self.count == 1 else self.gradient
        for first in range(0, self.count, 4 * self.blocks):
            some = weights[:, first : first + 4 * self.blocks]
            block = torch.zeros_like(shift)
            if self.count > 1:
                block = torch.arange(some.shape[1], device=shift.device)[:, None, None] + first
                block = block + shift - self.first
            known = (item >= 0) & (item < self.k) & (block >= 0) & (block < gradient.shape[1])
            index = (block * self.k + item) * self.c + key
            # Where nothing may be read the product of gradients means nothing, and may be infinite.
            found = gradient.flatten(1)[:, index.where(known, 0)].view_as(some)
            some *= found.masked_fill_(~known | (some == 0), 0.0)
        return weights

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
    blocks = side.blocks
    buffer = Buffer(v, height, overlap, side.weights.dtype)
    source = Buffer(v, height, 0, side.weights.dtype)
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
        if reach.causal and not torch.equal(m, old):
            base *= buffer.scale(torch.exp(m - old), height)
        fill_rows(buffer, 0, rows, query, height, into.q)
        tail = side.sums(buffer, overlap, query + overlap)
        far = after(base, tail)
        if earlier is not None:
            far += before(earlier[chunk - side.chunks[0]], side.sums(buffer, 0, query))
        first = chunk * blocks - side.first
        near = side.near(chunk)
        out = far[:, :, None].expand(-1, -1, c, -1).contiguous()
        out = add_near(out, near, buffer).flatten(1, 2)
        base = base + tail.sum(1)
        keys = slice(min(max(0, at), k.shape[0]), min(max(0, at + height), k.shape[0]))
        _fill_source(source, keys.start - at, k[keys], v[keys], m)
        write_keys(source, out, keys.start - at, v[keys], into.k[keys], into.v[keys])
        for head, gradient in enumerate(side.gradient[:, first : first + blocks]):
            queries = buffer.windows(head, blocks, c, side.k)
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
    if v.shape[-1] == 1:
        den.addcmul_(num[..., 0], v[..., 0])
    else:
        den.add_(num.mul_(v).sum(-1))
    torch.mul(den, weight, out=dk)


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
    gate, flow = torch.sigmoid(q, out=buffer.num[place]), g * y
    if dq is not None:
        torch.addcmul(flow, flow, gate, value=-1.0, out=dq[low:high])
    flow = flow[..., 0] if flow.shape[-1] == 1 else flow.sum(-1)
    # One pass over the rows where a quotient and a change of sign would be two.
    torch.addcdiv(flow.new_zeros(()), flow, den, value=-1.0, out=buffer.den[place])
    gate.mul_(g).div_(den[..., None])


def _earlier(rows: Outcome, side: KeySide, buffer: Buffer, reach: Reach) -> list[Tensor]:
    total = torch.zeros_like(buffer.data[:, 0])
    sums = []
    for chunk in side.chunks:
        sums.append(total)
        query = chunk * buffer.rows - reach.right
        fill_rows(buffer, 0, rows, query, buffer.rows, None)
        total = total + side.sums(buffer, 0, query).sum(1)
    return sums

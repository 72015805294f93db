r"""Walking over time: sums that follow a sequence in chunks.

The page `banded` says what is computed; this one computes it, for the channels of one tile, forward and
backward. Queries are walked up, gradients are walked down, and both ways the same things happen: the new
rows of a chunk join a buffer behind the rows that are still within reach, one matrix product serves the near
pairs, and what falls out of reach joins a running sum.

The shapes here are `[rows, N, H]` for keys and denominators and `[rows, N, H, E]` for values and queries:
`H` heads with biases of their own, `N` keys in each, and `E` values that share a key.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CHUNK",
    "TINY",
    "Buffer",
    "Reach",
    "after",
    "before",
    "chunk_rows",
    "columns",
    "fill",
    "near_product",
    "push",
]

# A key may exceed the reference by this much before it needs a new one: $e^{40}$ leaves room for sums over
# millions of rows in float32.
HEADROOM = 40.0
# Below this denominator, weights that matter may have been flushed to zero: such rows are redone elsewhere.
TINY = 1e-25
CHUNK = 128


class Reach(NamedTuple):
    r"""Which keys a block of queries meets: the shape behind the matrices of biases.

    Query `t` stands at the position of key `start + t`. A block of $C$ queries meets the keys from `left`
    before its first query to `right` after its last one, $K = \mathrm{left} + C + \mathrm{right}$. Keys
    outside of these are read with bias 0 if `far` is true (only the past ones if `causal`), else not at all.
    """

    left: int
    right: int
    start: int
    causal: bool
    far: bool


def chunk_rows(c: int, reach: Reach) -> int:
    r"""Rows of a chunk: whole blocks, and enough of them that only neighbouring chunks overlap."""
    return c * -(-max(CHUNK, reach.left + reach.right) // c)


# ## The buffer
#
# Overlapping windows of rows need no copies: they are one buffer, read with a stride of $C$ rows and a height
# of $K$. The columns hold denominators first, then numerators, so that one product serves both.
class Buffer:
    r"""Rows of a chunk and of what overlaps it: denominators in the first `n` columns, then numerators."""

    def __init__(self, v: Tensor, rows: int, overlap: int, dtype: torch.dtype):
        _, self.n, heads, self.e = v.shape
        self.data = v.new_zeros(heads, rows + overlap, self.n * (1 + self.e), dtype=dtype)
        self.rows, self.overlap = rows, overlap

    def den(self, first: int, last: int) -> Tensor:
        r"""View the denominators of some rows, `[rows, N, H]`."""
        return self.data[:, first:last, : self.n].permute(1, 2, 0)

    def num(self, first: int, last: int) -> Tensor:
        r"""View the numerators of some rows, `[rows, N, H, E]`."""
        return self.data[:, first:last, self.n :].unflatten(-1, (self.n, self.e)).permute(1, 2, 0, 3)

    def clear(self, first: int, last: int) -> None:
        r"""Set some rows to zero."""
        if last > first:
            self.data[:, first:last].zero_()

    # Consecutive chunks overlap. Rows already computed move from one end of the buffer to the other.
    def carry_up(self) -> None:
        r"""Keep the last rows as the first of the next chunk."""
        self.data[:, : self.overlap] = self.data[:, self.rows :]

    def carry_down(self) -> None:
        r"""Keep the first rows as the last of the previous chunk."""
        self.data[:, self.rows :] = self.data[:, : self.overlap]

    def scale(self, factor: Tensor, first: int, last: int) -> None:
        r"""Multiply some rows by a factor for each key."""
        self.data[:, first:last].mul_(columns(factor, self.e)[:, None])

    def blocks(self, first: int, blocks: int, c: int) -> Tensor:
        r"""View rows as blocks, `[H, blocks, c, N + N E]`."""
        return self.data[:, first : first + blocks * c].unflatten(1, (blocks, c))

    def windows(self, head: int, blocks: int, c: int, height: int) -> Tensor:
        r"""View rows as overlapping windows, one every `c` rows, `[blocks, height, N + N E]`."""
        data = self.data[head]
        width = data.shape[1]
        return data.as_strided((blocks, height, width), (c * width, width, 1), data.storage_offset())


# A factor for each key, `[N, H]`, laid out as the columns of a buffer, `[H, N + N E]`.
def columns(factor: Tensor, e: int) -> Tensor:
    r"""Repeat a factor of keys over their denominators and numerators."""
    factor = factor.t()
    return torch.cat([factor, factor.repeat_interleave(e, dim=1)], dim=1)


def near_product(weights: Tensor, buffer: Buffer) -> Tensor:
    r"""Multiply each block's weights with its window of rows, `[H, blocks, C, N + N E]`."""
    heads, blocks, c, height = weights.shape
    out = weights.new_empty(heads, blocks, c, buffer.data.shape[2])
    for head in range(heads):
        torch.bmm(weights[head], buffer.windows(head, blocks, c, height), out=out[head])
    return out


# Biases that do not depend on time are stored for one block only.
def _part(weights: Tensor, first: int, count: int) -> Tensor:
    return weights.expand(-1, count, -1, -1) if weights.shape[1] == 1 else weights[:, first : first + count]


# Sums of sums: within a chunk first, then over chunks. Added one by one, 65,536 rows would lose two of the
# seven digits of float32.
def before(base: Tensor, sums: Tensor) -> Tensor:
    r"""Sums over all earlier blocks, on top of `base`."""
    return base[:, None] + torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1].cumsum(1)], dim=1)


def after(base: Tensor, sums: Tensor) -> Tensor:
    r"""Sums over all later blocks, on top of `base`."""
    return before(base, sums.flip(1)).flip(1)


def fill(buffer: Buffer, at: int, k: Tensor, v: Tensor, m: Tensor, *, hide: bool = False) -> None:
    r"""Write $e^{k - m}$ and $e^{k - m} v$ into the rows from `at` on."""
    last = at + k.shape[0]
    e = buffer.den(at, last)
    torch.sub(k, m, out=e)
    # Only rows before such a key are kept, so it must not overflow in the product for them.
    if hide:
        e.masked_fill_(e > HEADROOM, -math.inf)
    e.exp_()
    torch.mul(e[..., None], v, out=buffer.num(at, last))


def _total(k: Tensor, v: Tensor, m: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros_like(columns(m, v.shape[-1]), dtype=dtype)
    for keys, values in zip(k.split(CHUNK), v.split(CHUNK), strict=True):
        buffer = Buffer(v, keys.shape[0], 0, dtype)
        fill(buffer, 0, keys, values, m)
        total += buffer.data.sum(1)
    return total


# ## Up: from keys to queries
#
# The reference $m$ of a chunk is the largest key *before* it. A maximum that looked ahead would let a key
# move the rows before it; this one leaves them their very bits, whatever comes later.
def push(
    q: Tensor, k: Tensor, v: Tensor, near: Tensor, beyond: Tensor, reach: Reach, y: Tensor, den: Tensor
) -> list[Tensor]:
    r"""Write the gated means into `y` and their denominators into `den`; return the reference of each chunk.

    `near` `[H, blocks, C, K]` and `beyond` `[H, blocks, C, 1]` are the weights of near keys and of far ones;
    with one block only, they serve all.
    """
    c, length, dtype = near.shape[2], q.shape[0], near.dtype
    rows, overlap = chunk_rows(c, reach), reach.left + reach.right
    buffer = Buffer(v, rows, overlap, dtype)
    seen = _peak(k[: reach.start] if reach.causal else k, dtype)
    m = _reference(seen, k[reach.start : reach.start + rows])
    base = _open(buffer, k, v, m, reach)
    later = [] if reach.causal or not reach.far else _later(k, v, m, reach, length, c, rows)
    references = []
    for chunk, start in enumerate(range(0, length, rows)):
        count = min(rows, length - start)
        blocks = -(-count // c)
        first = reach.start + start + reach.right
        new, to = slice(first, first + rows), slice(start, start + count)
        keys, values = k[new], v[new]
        if reach.causal:
            m = _shrink(m, _reference(seen, keys), buffer, base)
            seen = torch.maximum(seen, _peak(keys, dtype))
        buffer.clear(overlap + keys.shape[0], overlap + rows)
        weights = _part(near, start // c, blocks), _part(beyond, start // c, blocks)
        ahead = later[chunk] if later else None
        begin = None
        while True:
            rises = _peak(keys, dtype) - m > HEADROOM
            last = not reach.causal or not bool(rises.any())
            fill(buffer, overlap, keys, values, m, hide=not last)
            out, sums = _read(buffer, *weights, base, ahead)
            _write(out, q[to], y[to], den[to], begin)
            if last:
                break
            begin, m = _rise(m, rises, keys, den[to], buffer, base)
        references.append(m)
        base = base + sums.sum(1)
        buffer.carry_up()
    return references


def _peak(k: Tensor, dtype: torch.dtype) -> Tensor:
    return k.amax(0).to(dtype) if k.shape[0] else k.new_full(k.shape[1:], -math.inf, dtype=dtype)


# Where nothing was seen yet, the first real key serves: the rows before it read nothing anyway.
def _reference(seen: Tensor, keys: Tensor) -> Tensor:
    unseen = seen == -math.inf
    if keys.shape[0] and bool(unseen.any()):
        first = (keys > -math.inf).to(torch.uint8).argmax(0)
        seen = torch.where(unseen, keys.gather(0, first[None])[0].to(seen.dtype), seen)
    return seen.masked_fill(seen == -math.inf, 0.0)


def _open(buffer: Buffer, k: Tensor, v: Tensor, m: Tensor, reach: Reach) -> Tensor:
    low, high = max(0, reach.start - reach.left), min(k.shape[0], reach.start + reach.right)
    at = low - (reach.start - reach.left)
    if high > low:
        fill(buffer, at, k[low:high], v[low:high], m)
    return _total(k[:low] if reach.far else k[:0], v[:low] if reach.far else v[:0], m, buffer.data.dtype)


# What lies beyond the right end of each chunk's buffer, gathered from the end.
def _later(k: Tensor, v: Tensor, m: Tensor, reach: Reach, length: int, c: int, rows: int) -> list[Tensor]:
    starts = range(0, length, rows)
    edges = [reach.start + reach.right + min(s + rows, -(-length // c) * c) for s in starts]
    sums = []
    total, high = torch.zeros_like(columns(m, v.shape[-1])), k.shape[0]
    for edge in reversed(edges):
        low = min(edge, high)
        total = total + _total(k[low:high], v[low:high], m, m.dtype)
        sums.append(total)
        high = low
    return sums[::-1]


def _shrink(old: Tensor, new: Tensor, buffer: Buffer, base: Tensor) -> Tensor:
    factor = torch.exp((old - new).clamp_max(0.0))
    buffer.scale(factor, 0, buffer.overlap)
    base.mul_(columns(factor, buffer.e))
    return new


# A key far above the reference splits its channel: the rows before it are done, those from it on are computed
# again with the key itself as reference. It is in their past, so this too is hidden from earlier rows.
def _rise(
    m: Tensor, rises: Tensor, keys: Tensor, den: Tensor, buffer: Buffer, base: Tensor
) -> tuple[Tensor, Tensor]:
    first = (keys - m > HEADROOM).to(torch.uint8).argmax(0)
    raised = torch.where(rises, keys.gather(0, first[None])[0].to(m.dtype), m)
    # What a rising reference flushes is marked: the mean is good, its gradients must be redone.
    fine = den >= TINY
    den.mul_(torch.exp(m - raised))
    den.masked_fill_((fine & (den < TINY)) | (den < 0), -1.0)
    return torch.where(rises, first, den.shape[0]), _shrink(m, raised, buffer, base)


def _read(
    buffer: Buffer, near: Tensor, beyond: Tensor, base: Tensor, ahead: Tensor | None
) -> tuple[Tensor, Tensor]:
    _, blocks, c, _ = near.shape
    out = near_product(near, buffer)
    sums = buffer.blocks(0, blocks, c).sum(2)
    far = before(base, sums)
    if ahead is not None:
        far += after(ahead, buffer.blocks(buffer.overlap, blocks, c).sum(2))
    out.addcmul_(beyond, far[:, :, None])
    return out.flatten(1, 2), sums


def _write(out: Tensor, q: Tensor, y: Tensor, den: Tensor, begin: Tensor | None) -> None:
    count, n, _, e = q.shape
    below = out[:, :count, :n].permute(1, 2, 0)
    above = out[:, :count, n:].unflatten(-1, (n, e)).permute(1, 2, 0, 3)
    gated = torch.div(above, below[..., None]).mul_(torch.sigmoid(q))
    if begin is not None:
        again = torch.arange(count, device=q.device)[:, None, None] >= begin
        below = torch.where(again, below, den)
        gated = torch.where(again[..., None], gated, y)
    den.copy_(below)
    y.copy_(gated)

r"""Walking over time: sums that follow a sequence in chunks.

The page `gated_mean` says what is computed; this one computes it, for the channels of one tile, and
`walk_back` computes its gradients. Queries are walked up, gradients are walked down, and both ways the same
happens: the new rows of a chunk join a buffer behind the rows that are still within reach, one matrix product
serves the near pairs, and what falls out of reach joins a running sum.

The shapes here are `[rows, N, H]` for keys and denominators and `[rows, N, H, E]` for values and queries:
`H` heads with biases of their own, `N` keys in each, and `E` values that share a key.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "COLUMNS",
    "HEADROOM",
    "ROWS",
    "TINY",
    "Buffer",
    "Reach",
    "add_near",
    "after",
    "before",
    "chunk_rows",
    "fill",
    "peak_of",
    "push",
    "reference",
    "rise",
    "split",
    "write",
]

# A key may exceed the reference by this much before it needs a new one. It leaves room for sums over millions
# of rows, and for the quotients of the backward pass.
HEADROOM = 20.0
# Keys of an ordinary model need no reference: one this near to 0 is taken as 0, and nothing is subtracted.
CALM = 8.0
# Below this denominator, weights that matter may have been flushed to zero: such rows are redone elsewhere.
TINY = 1e-25
ROWS, COLUMNS = 128, 2048
# Powers of two are twice as quick in PyTorch as those of $e$, the extra product included.
LOG2E = 1 / math.log(2)


class Reach(NamedTuple):
    r"""Which keys a block of queries meets: the shape behind the matrices of biases.

    Query `t` stands at the position of key `start + t`. A block of $C$ queries meets the keys from `left`
    before its first query to `right` after its last one, $K = \mathrm{left} + C + \mathrm{right}$. Keys
    outside of these are read with bias 0 if `far` is true (only the past ones if `causal`), else not at all.
    With `pairs` true there are no blocks: the biases are a matrix of all queries and keys. With `skewed` true
    a key more than `left` before its query, or more than `right` after it, has no bias of its own: where a
    block lists such a key, it weighs as far keys do for its query, and nothing is learnt there.
    """

    left: int
    right: int
    start: int
    causal: bool
    far: bool
    pairs: bool = False
    skewed: bool = False


# Some hundred thousand elements at a time stay in the processor's cache and outweigh the cost of a call. A
# chunk needs several tables of its size, which beside a short and narrow sequence would take more memory than
# the sequence; so such a one is cut into eight, or into chunks of the least size.
def chunk_rows(c: int, reach: Reach, length: int, width: int) -> int:
    r"""Rows of a chunk `width` columns wide: whole blocks; enough that only neighbouring chunks overlap."""
    rows = min(ROWS * COLUMNS // max(width, 1), 4 * ROWS, length // 8)
    return c * -(-max(min(max(rows, ROWS), length), reach.left + reach.right, 1) // c)


# ## The buffer
#
# Overlapping windows of rows need no copies: they are one buffer, read with a stride of $C$ rows and a height
# of $K$. The columns hold denominators first, then numerators, so that one product serves both.
class Buffer:
    r"""Rows of a chunk and of what overlaps it.

    `den` `[rows, N, H]` and `num` `[rows, N, H, E]` are views of the columns of `data` `[H, rows, N + N E]`.
    """

    def __init__(self, v: Tensor, rows: int, overlap: int, dtype: torch.dtype):
        _, n, heads, self.e = v.shape
        width = n * (1 + self.e)
        # Rows a power of two apart would share the same few lines of the processor's cache.
        self.data = v.new_zeros(heads, rows + overlap, width + 32, dtype=dtype)[..., :width]
        self.den, self.num = split(self.data, n)
        self.rows, self.overlap = rows, overlap

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

    def scale(self, factor: Tensor, first: int) -> Tensor:
        r"""Multiply the `overlap` rows from `first` on by a factor of keys; return it for all columns."""
        factor = factor.t()
        factor = torch.cat([factor, factor.repeat_interleave(self.e, dim=1)], dim=1)
        self.data[:, first : first + self.overlap].mul_(factor[:, None])
        return factor

    def blocks(self, first: int, blocks: int, c: int) -> Tensor:
        r"""View rows as blocks, `[H, blocks, c, N + N E]`."""
        return self.data[:, first : first + blocks * c].unflatten(1, (blocks, c))

    def windows(self, head: int, blocks: int, c: int, height: int) -> Tensor:
        r"""View rows as overlapping windows, one every `c` rows, `[blocks, height, N + N E]`."""
        data = self.data[head]
        step = data.stride(0)
        return data.as_strided((blocks, height, data.shape[1]), (c * step, step, 1), data.storage_offset())


def split(columns: Tensor, n: int) -> tuple[Tensor, Tensor]:
    r"""View `[H, rows, N + N E]` as denominators `[rows, N, H]` and numerators `[rows, N, H, E]`."""
    return columns[..., :n].permute(1, 2, 0), columns[..., n:].unflatten(-1, (n, -1)).permute(1, 2, 0, 3)


def add_near(out: Tensor, weights: Tensor, buffer: Buffer) -> Tensor:
    r"""Add each block's weights times its window of rows to `out`, `[H, blocks, C, N + N E]`; return it."""
    _, blocks, c, height = weights.shape
    for head, far in enumerate(out):
        far.baddbmm_(weights[head], buffer.windows(head, blocks, c, height))
    return out


# Sums of sums: within a chunk first, then over chunks. Added one by one, 65,536 rows would lose two of the
# seven digits of float32. A product with a triangle of ones is the quickest way to a few running sums.
def before(base: Tensor, sums: Tensor) -> Tensor:
    r"""Sums over all earlier blocks, on top of `base`."""
    blocks = sums.shape[1]
    return torch.baddbmm(
        base[:, None], sums.new_ones(blocks, blocks).tril_(-1).expand(len(sums), -1, -1), sums
    )


def after(base: Tensor, sums: Tensor) -> Tensor:
    r"""Sums over all later blocks, on top of `base`."""
    blocks = sums.shape[1]
    return torch.baddbmm(
        base[:, None], sums.new_ones(blocks, blocks).triu_(1).expand(len(sums), -1, -1), sums
    )


def fill(buffer: Buffer, at: int, k: Tensor, v: Tensor, m: Tensor, *, hide: bool = False) -> None:
    r"""Write $e^{k - m}$ and $e^{k - m} v$ into the rows from `at` on."""
    rows = slice(at, at + k.shape[0])
    e = buffer.den[rows]
    if k.dtype == e.dtype and not (hide or bool(m.any())):
        torch.mul(k, LOG2E, out=e)
    else:
        torch.sub(k, m, out=e)
        # Only rows before such a key are kept, so it must not overflow in the product for them.
        if hide:
            e.masked_fill_(e > HEADROOM, -math.inf)
        e.mul_(LOG2E)
    e.exp2_()
    torch.mul(e[..., None], v, out=buffer.num[rows])


def _total(k: Tensor, v: Tensor, m: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros_like(Buffer(v[:0], 1, 0, dtype).data[:, 0])
    for keys, values in zip(k.split(ROWS), v.split(ROWS), strict=True):
        buffer = Buffer(v, keys.shape[0], 0, dtype)
        fill(buffer, 0, keys, values, m)
        total += buffer.data.sum(1)
    return total


# ## Up: from keys to queries
#
# The reference $m$ of a chunk is the largest key *before* it. A maximum that looked ahead would let a key
# move the rows before it; this one leaves them their very bits, whatever comes later.
def push(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    beyond: Tensor,
    reach: Reach,
    rows: int,
    y: Tensor,
    den: Tensor,
) -> list[Tensor]:
    r"""Write the gated means into `y`, their denominators into `den`; return the reference of each chunk.

    `near` `[H, blocks, C, K]` and `beyond` `[H, blocks, C, 1]` are the weights of near keys and of far ones;
    with one block only, they serve all. A chunk is of `rows` rows.
    """
    c, length, overlap = near.shape[2], q.shape[0], reach.left + reach.right
    buffer = Buffer(v, rows, overlap, near.dtype)
    seen = peak_of(k[: reach.start] if reach.causal else k, near.dtype)
    m = reference(seen, k[reach.start : reach.start + rows])
    base = _open(buffer, k, v, m, reach)
    later = [] if reach.causal or not reach.far else _later(k, v, m, reach, length, c, rows)
    references = []
    for chunk, start in enumerate(range(0, length, rows)):
        to = slice(start, min(start + rows, length))
        blocks = -(-(to.stop - start) // c)
        first = reach.start + start + reach.right
        keys, values = k[first : first + rows], v[first : first + rows]
        weights = _part(near, start // c, blocks), _part(beyond, start // c, blocks)
        buffer.clear(overlap + keys.shape[0], overlap + rows)
        peak = m
        if reach.causal:
            if chunk > 0:
                m = _lift(m, reference(seen, keys), buffer, base)
            peak = peak_of(keys, near.dtype)
            seen = torch.maximum(seen, peak)
        begin = None
        while True:
            last = not reach.causal or not bool((peak - m > HEADROOM).any())
            fill(buffer, overlap, keys, values, m, hide=not last)
            out, sums = _read(buffer, *weights, base, later[chunk] if later else None)
            write(out, q[to], y[to], den[to], begin)
            if last:
                break
            begin, raised = rise(m, peak, keys, den[to])
            m = _lift(m, raised, buffer, base)
        references.append(m)
        base = base + sums.sum(1)
        buffer.carry_up()
    return references


# Biases that do not depend on time are stored for one block only.
def _part(weights: Tensor, first: int, count: int) -> Tensor:
    return weights.expand(-1, count, -1, -1) if weights.shape[1] == 1 else weights[:, first : first + count]


def peak_of(k: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Give the largest key of each column, $-\infty$ if there is none."""
    return k.amax(0).to(dtype) if k.shape[0] else k.new_full(k.shape[1:], -math.inf, dtype=dtype)


# Where nothing was seen yet, the first real key serves: the rows before it read nothing anyway.
def reference(seen: Tensor, keys: Tensor) -> Tensor:
    r"""Give a finite reference: the largest key `seen`, else the first of the chunk's own `keys`."""
    unseen = seen == -math.inf
    if not bool(unseen.any()):
        return _calm(seen)
    if keys.shape[0]:
        real = keys > -math.inf
        first = keys[0] if bool(real[0].all()) else keys.gather(0, real.to(torch.uint8).argmax(0)[None])[0]
        seen = torch.where(unseen, first.to(seen.dtype), seen)
    return _calm(seen.masked_fill(seen == -math.inf, 0.0))


def _calm(m: Tensor) -> Tensor:
    return m.masked_fill(m.abs() <= CALM, 0.0)


def _open(buffer: Buffer, k: Tensor, v: Tensor, m: Tensor, reach: Reach) -> Tensor:
    low, high = max(0, reach.start - reach.left), min(k.shape[0], reach.start + reach.right)
    if high > low:
        fill(buffer, low - (reach.start - reach.left), k[low:high], v[low:high], m)
    low = low if reach.far else 0
    return _total(k[:low], v[:low], m, buffer.data.dtype)


# What lies beyond the right end of each chunk's buffer, gathered from the end.
def _later(k: Tensor, v: Tensor, m: Tensor, reach: Reach, length: int, c: int, rows: int) -> list[Tensor]:
    ends = [min(start + rows, c * -(-length // c)) for start in range(0, length, rows)]
    sums, high = [_total(k[:0], v[:0], m, m.dtype)], k.shape[0]
    for end in reversed(ends):
        low = min(reach.start + reach.right + end, high)
        sums.append(sums[-1] + _total(k[low:high], v[low:high], m, m.dtype))
        high = low
    return sums[:0:-1]


# All sums shrink when their reference is lifted.
def _lift(old: Tensor, new: Tensor, buffer: Buffer, base: Tensor) -> Tensor:
    if not torch.equal(old, new):
        base.mul_(buffer.scale(torch.exp((old - new).clamp_max(0.0)), 0))
    return new


# A key far above the reference splits its channel: the rows before it are done, those from it on are computed
# again with the key itself as reference. It is in their past, so this too is hidden from earlier rows.
def rise(m: Tensor, peak: Tensor, keys: Tensor, den: Tensor) -> tuple[Tensor, Tensor]:
    r"""Raise the references that a key exceeds: return the rows to begin again at, and the new references."""
    rises = peak - m > HEADROOM
    first = (keys - m > HEADROOM).to(torch.uint8).argmax(0)
    raised = torch.where(rises, _calm(keys.gather(0, first[None])[0].to(m.dtype)), m)
    # What a rising reference flushes is marked: the mean is good, its gradients must be redone.
    fine = den >= TINY
    den.mul_(torch.exp(m - raised))
    den.masked_fill_((fine & (den < TINY)) | (den < 0), -1.0)
    return torch.where(rises, first, den.shape[0]), raised


def _read(
    buffer: Buffer, near: Tensor, beyond: Tensor, base: Tensor, ahead: Tensor | None
) -> tuple[Tensor, Tensor]:
    _, blocks, c, _ = near.shape
    sums = buffer.blocks(0, blocks, c).sum(2)
    far = before(base, sums)
    if ahead is not None:
        far += after(ahead, buffer.blocks(buffer.overlap, blocks, c).sum(2))
    return add_near(beyond * far[:, :, None], near, buffer).flatten(1, 2), sums


def write(out: Tensor, q: Tensor, y: Tensor, den: Tensor, begin: Tensor | None) -> None:
    r"""Write means times gates, and denominators; only the rows from `begin` on, if given."""
    count, n, _, _ = q.shape
    below, above = (x[:count] for x in split(out, n))
    gated = torch.sigmoid(q.to(out.dtype)).mul_(above)
    if begin is None:
        den.copy_(below)
        torch.div(gated, below[..., None], out=y)
        return
    again = torch.arange(count, device=q.device)[:, None, None] >= begin
    y.copy_(torch.where(again[..., None], gated.div_(below[..., None]), y))
    den.copy_(torch.where(again, below, den))

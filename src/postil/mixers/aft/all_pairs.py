r"""The engine of AFT-full: a bias for every pair.

When all pairs have biases of their own, the matrix of weights is dense, but it is one matrix for all
channels. So the sums are plain matrix products, $e^{w}\,[\,e^{k - m},\; e^{k - m} v\,]$, taken a block of
rows at a time so that $e^w$ is never stored, and, for a causal model, only up to the diagonal.

The reference $m$ keeps the exponentials in range. Every block of rows has one of its own, the largest key
before the block, so that no row depends on a key after it. What happens where a block holds a still larger
key is told on the page `walk`, whose functions do the work here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from postil.mixers.aft.walk import HEADROOM, Buffer, Reach, fill, peak_of, reference, rise, write
from postil.mixers.aft.walk_back import Gradients, Outcome, fill_rows, write_keys

__all__ = ["BLOCK", "pull_all_pairs", "push_all_pairs"]

BLOCK = 256


# A block reads all keys, or those up to its last row, where the triangle above the diagonal is left out.
def _block(bias: Tensor, start: int, first: int, causal: bool, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    rows = bias[first : first + BLOCK].to(dtype)
    count, keys = rows.shape
    if not causal:
        known, stop = keys, keys
    else:
        known, stop = min(keys, start + first), min(keys, start + first + count)
        rows = rows[:, :stop]
        own = torch.arange(known, stop, device=bias.device) - start - first
        future = own > torch.arange(count, device=bias.device)[:, None]
        rows = torch.cat([rows[:, :known], rows[:, known:].masked_fill(future, -math.inf)], dim=1)
    top = rows.amax(dim=1, keepdim=True) if stop else rows.new_zeros(count, 1)
    return torch.exp(rows - top.masked_fill(top == -math.inf, 0.0)), known, stop


def push_all_pairs(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach, y: Tensor, den: Tensor
) -> list[Tensor]:
    r"""Write gated means and denominators for biases `[T, S]`; return the reference of each block of rows.

    Cost: $T S N$ time for $N$ columns, half of it if causal; $2 S N$ numbers beside the results.
    """
    references = []
    for first in range(0, q.shape[0], BLOCK):
        to = slice(first, min(first + BLOCK, q.shape[0]))
        weights, known, stop = _block(bias, reach.start, first, reach.causal, den.dtype)
        own = k[known:stop]
        peak = peak_of(own, den.dtype)
        m = reference(peak_of(k[:known], den.dtype), own)
        buffer, begin = Buffer(v, stop, 0, den.dtype), None
        while True:
            last = not bool((peak - m > HEADROOM).any())
            fill(buffer, 0, k[:stop], v[:stop], m, hide=not last)
            write(torch.matmul(weights, buffer.data), q[to], y[to], den[to], begin)
            if last:
                break
            begin, m = rise(m, peak, own, den[to])
        references.append(m)
    return references


def pull_all_pairs(
    rows: Outcome, k: Tensor, v: Tensor, references: Tensor, into: Gradients, bias: Tensor, reach: Reach
) -> Tensor:
    r"""Write the gradients of `push_all_pairs` for queries, keys and values; return that of the biases."""
    into.k.zero_()
    into.v.zero_()
    dbias = torch.zeros(bias.shape, dtype=rows.den.dtype, device=bias.device)
    for block, m in enumerate(references):
        first = block * BLOCK
        weights, _, stop = _block(bias, reach.start, first, reach.causal, rows.den.dtype)
        queries = Buffer(v, weights.shape[0], 0, rows.den.dtype)
        fill_rows(queries, 0, rows, first, weights.shape[0], into.q)
        source = Buffer(v, stop, 0, rows.den.dtype)
        fill(source, 0, k[:stop], v[:stop], m)
        product = queries.data[0] @ source.data[0].t()
        # Where nothing may be read the product means nothing, and may be infinite.
        dbias[first : first + weights.shape[0], :stop] = product.masked_fill_(weights == 0, 0.0).mul_(weights)
        dk, dv = torch.empty_like(k[:stop]), torch.empty_like(v[:stop])
        write_keys(source, torch.matmul(weights.t(), queries.data), 0, v[:stop], dk, dv)
        into.k[:stop] += dk
        into.v[:stop] += dv
    return dbias

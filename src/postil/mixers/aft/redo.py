r"""What leaves the range of the fast forms, and how it comes back.

A fast form computes relative to a reference, and all of its factors are at most $e^{20}$; so a denominator of
at least $10^{-25}$ has lost nothing that matters. Below that, weights may have been flushed to zero: in a row
of biases under $-50$, say. Such rows, and only those, are computed again in log space, in float64. Checking
afterwards costs next to nothing, and the fast form needs no other care.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from postil.mixers.aft.log_space import weighted_mean, weighted_mean_gradients
from postil.mixers.aft.walk import ROWS, TINY, Reach
from postil.mixers.aft.walk_back import Gradients, Outcome

__all__ = ["literal_bias", "redo", "redo_gradients"]


def redo(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach, y: Tensor, den: Tensor) -> None:
    r"""Write the means of lost rows into `y`; of empty ones too, whose denominators become 1."""
    empty = _empty(k, reach, q.shape[0])
    den.masked_fill_(empty, 1.0)
    y.masked_fill_(empty[..., None], 0.0)
    for rows, n, keys in _where(_lost(den), reach, k.shape[0]):
        literal = literal_bias(bias, reach, rows, keys)
        mean, _ = weighted_mean(k[:keys, n].double(), v[:keys, n].double(), literal, None)
        gated = (mean * torch.sigmoid(q[rows][:, n].double())).to(y.dtype)
        at = (rows[:, None], n[None])
        y[at] = torch.where(_lost(den[at])[..., None], gated, y[at])


def redo_gradients(
    rows: Outcome, k: Tensor, v: Tensor, bias: Tensor, reach: Reach, into: Gradients, dbias: Tensor
) -> None:
    r"""Add what lost rows contribute to the gradients of keys, values and biases."""
    for at, n, keys in _where(rows.den < TINY, reach, k.shape[0]):
        literal = literal_bias(bias, reach, at, keys)
        there = (at[:, None], n[None])
        g = rows.g[there].double() * torch.sigmoid(rows.q[there].double())
        g = g.masked_fill((rows.den[there] >= TINY)[..., None], 0.0)
        some_k, some_v = k[:keys, n].double(), v[:keys, n].double()
        mean, log_den = weighted_mean(some_k, some_v, literal, None)
        dk, dv, dw = weighted_mean_gradients(g, some_k, some_v, literal, None, mean, log_den)
        into.k[:keys, n] += dk.to(into.k.dtype)
        into.v[:keys, n] += dv.to(into.v.dtype)
        column, inside, block = _place(bias, reach, at, keys)
        index = (block * bias.shape[2] + at % bias.shape[2])[:, None] * bias.shape[3] + column
        dbias.flatten(1).index_add_(1, index[inside], dw[:, inside].to(dbias.dtype))


# Rows before the first real key read nothing. In a batch padded on the left these are many, and need no redo.
def _empty(k: Tensor, reach: Reach, length: int) -> Tensor:
    real = k > -math.inf
    first = torch.where(real.any(0), real.to(torch.uint8).argmax(0), k.shape[0] + reach.start + length + 1)
    last = reach.start + torch.arange(length, device=k.device)
    last = last if reach.causal else last.clamp_min(k.shape[0])
    return last[:, None, None] < first


# A negative denominator marks a row whose mean is good and whose denominator was lost when a later key
# raised the reference: only its gradients are redone, its value keeps its bits.
def _lost(den: Tensor) -> Tensor:
    return (den >= 0) & (den < TINY)


def _where(tiny: Tensor, reach: Reach, keys: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    for start in range(0, tiny.shape[0], ROWS):
        some = tiny[start : start + ROWS].any(2)
        rows, n = some.any(1).nonzero()[:, 0] + start, some.any(0).nonzero()[:, 0]
        if rows.numel():
            yield rows, n, min(keys, reach.start + int(rows[-1]) + 1) if reach.causal else keys


# Where the bias of a pair stands in the blocks: its column, whether there is one, and the block of its row.
def _place(bias: Tensor, reach: Reach, rows: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    _, blocks, c, k = bias.shape
    block = rows // c
    column = torch.arange(keys, device=rows.device) - (reach.start - reach.left + block * c)[:, None]
    return column, (column >= 0) & (column < k), block if blocks > 1 else torch.zeros_like(block)


def literal_bias(bias: Tensor, reach: Reach, rows: Tensor, keys: int) -> Tensor:
    r"""Write the biases of some rows out, `[H, rows, keys]`, $-\infty$ where a query may not read."""
    column, inside, block = _place(bias, reach, rows, keys)
    near = bias[:, block, rows % bias.shape[2]].double()
    near = near.gather(2, column.clamp(0, bias.shape[3] - 1).expand(bias.shape[0], -1, -1))
    readable = (column < 0) | (not reach.causal) if reach.far else torch.zeros_like(inside)
    far = near.new_zeros(()).masked_fill(~readable, -math.inf)
    future = torch.arange(keys, device=rows.device) > reach.start + rows[:, None]
    return torch.where(inside, near, far).masked_fill(future & reach.causal, -math.inf)

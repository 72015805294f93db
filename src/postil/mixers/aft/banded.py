r"""The engine of the fast forms: free weights near, one weight far.

All members of the family but one give every pair of *near* positions a bias, and all *far* pairs the bias 0.
So the sum over all keys is a small matrix product for the near ones and a running sum for the far ones:

$$\sum_s e^{k_s + w_{t,s}}\, v_s \;=\; e^{m} \Big[\, \sum_{\text{near}} e^{w_{t,s}}\, e^{k_s - m} v_s
\;+\; \sum_{\text{far}} e^{k_s - m} v_s \,\Big]$$

and the same without $v_s$ below the line, where $e^m$ cancels. Queries are taken in blocks of $C$; the near
keys of a block are the $K$ rows around it, so one block is one product with a $C \times K$ matrix. Time is
$T K D$ instead of $T^2 D$, memory $T D$. The page `walk` does this forward, `walk_back` backward; this one
prepares the weights, guards the range, and makes one differentiable function of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from postil.mixers.aft.log_space import (
    log_space_mean,
    one_sample_at_a_time,
    weighted_mean,
    weighted_mean_gradients,
)
from postil.mixers.aft.walk import COLUMNS, ROWS, TINY, Reach, chunk_rows, push
from postil.mixers.aft.walk_back import Gradients, KeySide, Outcome, pull

__all__ = ["Reach", "banded"]


def banded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach) -> Tensor:
    r"""Gate the means: $y = \sigma(q)\, N / D$.

    Queries are `[T, N, H, E]`, keys `[S, N, H]`, values `[S, N, H, E]`: `E` channels share one key.
    `bias` `[H, ceil(T / C) or 1, C, K]` holds the biases of each block of $C$ queries and the keys it meets,
    $-\infty$ where a query may not read; with one block, it serves all. A key more than `left` before its
    query, or more than `right` after it, may have a bias of its own only if both are multiples of $C$.
    A key of $-\infty$ hides that key; a query without keys gives 0.

    Cost: $T K N H E$ time; memory $T N H (E + 1)$ beyond its arguments, forward and backward.
    """
    return _Banded.apply(q, k, v, bias, [int(x) for x in reach])[0]


# Each row is scaled so that its largest weight is 1, that of far keys included. The scale cancels in the
# quotient, so no gradient passes through it.
def _weights(bias: Tensor, far: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    bias = bias.to(dtype)
    top = bias.amax(dim=-1, keepdim=True)
    top = top.clamp_min(0.0) if far else top.masked_fill(top == -math.inf, 0.0)
    return torch.exp(bias - top), torch.exp(-top) if far else torch.zeros_like(top)


# Channels do not meet each other here, so they are taken some at a time.
def _tiles(v: Tensor, rows: int) -> list[slice]:
    width = max(1, COLUMNS * max(ROWS, rows) // (rows * v.shape[2] * v.shape[3]))
    return [slice(n, n + width) for n in range(0, v.shape[1], width)]


def _rows(q: Tensor, bias: Tensor, reach: Reach) -> int:
    return chunk_rows(bias.shape[2], reach, q.shape[0], q.shape[1] * q.shape[2] * q.shape[3])


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(k.dtype, torch.float32)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    den = torch.empty(q.shape[:3], dtype=dtype, device=v.device)
    if 0 in (q.numel(), k.numel()):
        return y.zero_(), den.fill_(1.0), den.new_zeros(0, *den.shape[1:])
    near, beyond = _weights(bias, reach.far, dtype)
    rows = _rows(q, bias, reach)
    references = []
    for n in _tiles(v, rows):
        references.append(push(q[:, n], k[:, n], v[:, n], near, beyond, reach, rows, y[:, n], den[:, n]))
    if bool(den.amin() < TINY):
        _redo(q, k, v, bias, reach, y, den)
    return y, den, torch.cat([torch.stack(tile) for tile in references], dim=1)


# ## What leaves the range
#
# All factors are at most $e^{40}$, so a denominator of at least $10^{-25}$ has lost nothing that matters.
# Below that (a row of biases under $-50$, or a row whose reference rose far above it later) the row is
# computed again in log space, in float64. Checking afterwards costs next to nothing.
def _redo(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach, y: Tensor, den: Tensor) -> None:
    empty = _empty(k, reach, q.shape[0])
    den.masked_fill_(empty, 1.0)
    y.masked_fill_(empty[..., None], 0.0)
    for rows, n, keys in _where(_lost(den), reach, k.shape[0]):
        literal = _literal_bias(bias, reach, rows, keys)
        mean, _ = weighted_mean(k[:keys, n].double(), v[:keys, n].double(), literal, None)
        gated = (mean * torch.sigmoid(q[rows][:, n].double())).to(y.dtype)
        at = (rows[:, None], n[None])
        y[at] = torch.where(_lost(den[at])[..., None], gated, y[at])


def _redo_gradients(
    rows: Outcome, k: Tensor, v: Tensor, bias: Tensor, reach: Reach, into: Gradients, dbias: Tensor
) -> None:
    for at, n, keys in _where(rows.den < TINY, reach, k.shape[0]):
        literal = _literal_bias(bias, reach, at, keys)
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


def _literal_bias(bias: Tensor, reach: Reach, rows: Tensor, keys: int) -> Tensor:
    column, inside, block = _place(bias, reach, rows, keys)
    near = bias[:, block, rows % bias.shape[2]].double()
    near = near.gather(2, column.clamp(0, bias.shape[3] - 1).expand(bias.shape[0], -1, -1))
    readable = (column < 0) | (not reach.causal) if reach.far else torch.zeros_like(inside)
    far = near.new_zeros(()).masked_fill(~readable, -math.inf)
    return torch.where(inside, near, far)


def _backward(
    rows: Outcome, k: Tensor, v: Tensor, bias: Tensor, references: Tensor, reach: Reach
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    into = Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (rows.q, k, v)))
    near, beyond = _weights(bias, reach.far, rows.den.dtype)
    if 0 in (rows.q.numel(), k.numel()):
        return into.q.zero_(), into.k.zero_(), into.v.zero_(), torch.zeros_like(bias)
    chunk = _rows(rows.q, bias, reach)
    side = KeySide(near, beyond, reach, rows.q.shape[0], k.shape[0], chunk)
    # An infinite denominator takes a row out of the walk; its gradients are added afterwards.
    tiny = bool(rows.den.amin() < TINY)
    walked = rows._replace(den=rows.den.masked_fill(rows.den < TINY, math.inf)) if tiny else rows
    for n in _tiles(v, chunk):
        some, outcome = Gradients(*(x[:, n] for x in into)), Outcome(*(x[:, n] for x in walked))
        pull(outcome, k[:, n], v[:, n], references[:, n], side, reach, some)
    dbias = side.sorted_by_query(near) * near
    if tiny:
        _redo_gradients(rows, k, v, bias, reach, into, dbias)
    return into.q, into.k, into.v, dbias.to(bias.dtype)


# ## One differentiable function
#
# To the compiler and to `torch.export` the walk is one opaque operation: its loops would unroll, and its
# check of the range depends on data.
# Operations take lists of numbers, not tuples of our own making.
def _reach(numbers: list[int]) -> Reach:
    left, right, start, causal, far = numbers
    return Reach(left, right, start, bool(causal), bool(far))


@torch.library.custom_op("postil::aft_banded", mutates_args=())
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, numbers: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(q, k, v, bias, _reach(numbers))


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, numbers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(k.dtype, torch.float32)
    den = q.new_empty(q.shape[:3], dtype=dtype)
    chunks = -(-q.shape[0] // _rows(q, bias, _reach(numbers)))
    return q.new_empty(q.shape), den, den.new_empty(chunks, *den.shape[1:])


@torch.library.custom_op("postil::aft_banded_backward", mutates_args=())
def _backward_op(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    y: Tensor,
    den: Tensor,
    references: Tensor,
    numbers: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backward(Outcome(g, q, y, den), k, v, bias, references, _reach(numbers))


@_backward_op.register_fake
def _(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    y: Tensor,
    den: Tensor,
    references: Tensor,
    numbers: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), bias.new_empty(bias.shape)


one_sample_at_a_time(_forward_op)
one_sample_at_a_time(_backward_op)


# Gradients of gradients are rare and need no speed: they are those of the literal form.
def _literal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach) -> Tensor:
    rows = torch.arange(q.shape[0], device=q.device)
    return torch.sigmoid(q) * log_space_mean(k, v, _literal_bias(bias, reach, rows, k.shape[0]).to(k.dtype))


class _Gradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        y: Tensor,
        den: Tensor,
        references: Tensor,
        numbers: list[int],
    ) -> Any:
        return _backward_op(g, q, k, v, bias, y, den, references, numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.numbers = inputs[8]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reach = _reach(ctx.numbers)

        def literal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return _literal(q, k, v, bias, reach)

        def first(g: Tensor, *arguments: Tensor) -> Any:
            return torch.func.vjp(literal, *arguments)[1](g)

        return (*torch.func.vjp(first, *ctx.saved_tensors)[1](gradients), *[None] * 4)


class _Banded(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor, numbers: list[int]
    ) -> Any:
        return _forward_op(q, k, v, bias, numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.numbers = inputs[4]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, bias, y, den, references = ctx.saved_tensors
        found = _Gradients.apply(gradients[0], q, k, v, bias, y, den, references, ctx.numbers)
        return (*found, None)

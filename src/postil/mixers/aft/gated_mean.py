r"""The engine of the fast forms: gated means, near and far.

All members of the family but one give every pair of *near* positions a bias, and all *far* pairs the bias 0.
So the sum over all keys is a small matrix product for the near ones and a running sum for the far ones:

$$\sum_s e^{k_s + w_{t,s}}\, v_s \;=\; e^{m} \Big[\, \sum_{\text{near}} e^{w_{t,s}}\, e^{k_s - m} v_s
\;+\; \sum_{\text{far}} e^{k_s - m} v_s \,\Big]$$

and the same without $v_s$ below the line, where $e^m$ cancels. Queries are taken in blocks of $C$; the near
keys of a block are the $K$ rows around it, so one block is one product with a $C \times K$ matrix. Time is
$T K D$ instead of $T^2 D$, memory $T D$.

The page `walk` does this forward, `walk_back` backward, `all_pairs` where every pair has a bias; `redo` takes
what leaves their range. This one puts them together into one differentiable function.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from postil.mixers.aft import kernel
from postil.mixers.aft.all_pairs import BLOCK, pull_all_pairs, push_all_pairs
from postil.mixers.aft.log_space import log_space_mean, one_sample_at_a_time
from postil.mixers.aft.redo import literal_bias, redo, redo_gradients
from postil.mixers.aft.walk import COLUMNS, ROWS, TINY, Reach, chunk_rows, push
from postil.mixers.aft.walk_back import Gradients, KeySide, Outcome, pull

__all__ = ["Reach", "gated_mean"]


def gated_mean(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach) -> Tensor:
    r"""Gate the means: $y = \sigma(q)\, N / D$.

    Queries are `[T, N, H, E]`, keys `[S, N, H]`, values `[S, N, H, E]`: `E` channels share one key.
    `bias` `[H, ceil(T / C) or 1, C, K]` holds the biases of each block of $C$ queries and the keys it meets,
    $-\infty$ where a query may not read; with one block, it serves all. A key more than `left` before its
    query, or more than `right` after it, may have a bias of its own only if both are multiples of $C$.
    A key of $-\infty$ hides that key; a query without keys gives 0. With `reach.pairs`, `bias` is
    `[1, 1, T, S]` and `H = E = 1`.

    Cost: $T K N H E$ time; memory $T N H (E + 1)$ beyond its arguments, forward and backward.
    """
    return _GatedMean.apply(q, k, v, bias, [int(x) for x in reach])[0]


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


def _rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach) -> int:
    if reach.pairs:
        return BLOCK
    if kernel.fits(q, k, v, bias, reach):
        return kernel.ROWS
    return chunk_rows(bias.shape[2], reach, q.shape[0], q.shape[1] * q.shape[2] * q.shape[3])


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    den = torch.empty(q.shape[:3], dtype=torch.promote_types(k.dtype, torch.float32), device=v.device)
    if 0 in (q.numel(), k.numel()):
        return y.zero_(), den.fill_(1.0), den.new_zeros(0, *den.shape[1:])
    references = _walk(q, k, v, bias, reach, y, den)
    if bool(den.amin() < TINY):
        redo(q, k, v, bias, reach, y, den)
    return y, den, references


def _walk(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach, y: Tensor, den: Tensor) -> Tensor:
    weights = None if reach.pairs else _weights(bias, reach.far, den.dtype)
    if weights is not None and kernel.fits(q, k, v, bias, reach):
        return kernel.push(q, k, v, *weights, reach, y, den)
    rows, references = _rows(q, k, v, bias, reach), []
    for n in _tiles(v, rows):
        tile = q[:, n], k[:, n], v[:, n]
        if weights is None:
            references.append(push_all_pairs(*tile, bias[0, 0], reach, y[:, n], den[:, n]))
        else:
            references.append(push(*tile, *weights, reach, rows, y[:, n], den[:, n]))
    return torch.cat([torch.stack(tile) for tile in references], dim=1)


def _backward(
    rows: Outcome, k: Tensor, v: Tensor, bias: Tensor, references: Tensor, reach: Reach
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    into = Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (rows.q, k, v)))
    if 0 in (rows.q.numel(), k.numel()):
        return into.q.zero_(), into.k.zero_(), into.v.zero_(), torch.zeros_like(bias)
    # An infinite denominator takes a row out of the walk; its gradients are added afterwards.
    tiny = bool(rows.den.amin() < TINY)
    walked = rows._replace(den=rows.den.masked_fill(rows.den < TINY, math.inf)) if tiny else rows
    dbias = _walk_back(walked, k, v, bias, references, reach, into)
    if tiny:
        redo_gradients(rows, k, v, bias, reach, into, dbias)
    return into.q, into.k, into.v, dbias.to(bias.dtype)


def _walk_back(
    rows: Outcome, k: Tensor, v: Tensor, bias: Tensor, references: Tensor, reach: Reach, into: Gradients
) -> Tensor:
    if kernel.fits(rows.q, k, v, bias, reach):
        near, beyond = _weights(bias, reach.far, rows.den.dtype)
        gradient = kernel.pull(rows, k, v, near, beyond, references, reach, into)
        # Where nothing may be read the product of gradients means nothing, and may be infinite.
        return near.mul_(gradient.masked_fill_(near == 0, 0.0))
    chunk = _rows(rows.q, k, v, bias, reach)
    tiles = [
        (
            Outcome(*(x[:, n] for x in rows)),
            k[:, n],
            v[:, n],
            references[:, n],
            Gradients(*(x[:, n] for x in into)),
        )
        for n in _tiles(v, chunk)
    ]
    if reach.pairs:
        return torch.stack([pull_all_pairs(*tile, bias[0, 0], reach) for tile in tiles]).sum(0)[None, None]
    side = KeySide(*_weights(bias, reach.far, rows.den.dtype), reach, rows.q.shape[0], k.shape[0], chunk)
    for tile in tiles:
        pull(*tile, side, reach)
    return side.bias_gradient(_weights(bias, reach.far, rows.den.dtype)[0])


# ## One differentiable function
#
# To the compiler and to `torch.export` the walk is one opaque operation: its loops would unroll, and its
# check of the range depends on data.
# Operations take lists of numbers, not tuples of our own making.
def _reach(numbers: list[int]) -> Reach:
    left, right, start, *rules = numbers
    return Reach(left, right, start, *map(bool, rules))


# The signatures are written out: wrappers such as the shape checks of the tests hide the annotations.
@torch.library.custom_op(
    "postil::aft_gated_mean",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor bias, int[] numbers) -> (Tensor, Tensor, Tensor)",
)
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, numbers: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(q, k, v, bias, _reach(numbers))


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, numbers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(k.dtype, torch.float32)
    den = q.new_empty(q.shape[:3], dtype=dtype)
    chunks = -(-q.shape[0] // _rows(q, k, v, bias, _reach(numbers)))
    return q.new_empty(q.shape), den, den.new_empty(chunks, *den.shape[1:])


@torch.library.custom_op(
    "postil::aft_gated_mean_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor y, Tensor den, Tensor references,"
    " int[] numbers) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *found: Any) -> tuple[Tensor, ...]:
    y, den, references, numbers = found
    return _backward(Outcome(g, q, y, den), k, v, bias, references, _reach(numbers))


@_backward_op.register_fake
def _(g: Tensor, *forward: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in forward[:4])


one_sample_at_a_time(_forward_op)
one_sample_at_a_time(_backward_op)


# Gradients of gradients are rare and need no speed: they are those of the literal form.
def _literal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach) -> Tensor:
    rows = torch.arange(q.shape[0], device=q.device)
    return torch.sigmoid(q) * log_space_mean(k, v, literal_bias(bias, reach, rows, k.shape[0]).to(k.dtype))


# The compiler counts the arguments of `forward` to learn whether one of them is a context.
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


class _GatedMean(torch.autograd.Function):
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
        # Otherwise backward would be handed a gradient of zeros, a whole tensor, for the denominators too.
        ctx.set_materialize_grads(False)
        ctx.numbers = inputs[4]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return (None,) * 5
        return (*_Gradients.apply(gradients[0], *ctx.saved_tensors, ctx.numbers), None)

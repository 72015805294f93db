r"""The weighted mean in log space: slow, and right for every finite input.

Every member of the family computes, in each channel $n$, a mean of values under weights that grow
exponentially:

$$\mu_{t,n} = \sum_s p_{t,s,n}\, v_{s,n}, \qquad
p_{t,s,n} = \frac{e^{k_{s,n} + w_{t,s}}}{\sum_{s'} e^{k_{s',n} + w_{t,s'}}}$$

An exponential of a key alone may overflow, and one of a key minus some common maximum may vanish where it
matters. The exponent of a *weight* is never positive: $p = e^{k + w - \ell}$ with the logarithm $\ell$ of
the row's own denominator. That needs an exponential for each pair of positions in each channel, which the
fast forms avoid; this one takes over for masks without structure, and for the few rows whose weights leave
the range of the fast forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["log_space_mean", "weighted_mean", "weighted_mean_gradients"]

PAIRS = 1 << 20


# Rows are independent, so they are taken a few at a time. Nothing of size $T S$ in each channel ever exists.
def _row_blocks(rows: int, cost_of_a_row: int) -> Iterator[slice]:
    step = max(1, PAIRS // max(1, cost_of_a_row))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


# A key or a bias of $-\infty$ says that the pair does not exist. Masks of a batch row hold for all of its
# channels, which lie next to each other.
def _logits(k: Tensor, bias: Tensor, mask: Tensor | None, rows: slice) -> Tensor:
    logits = k[None] + bias[:, rows].permute(1, 2, 0)[:, :, None, :].to(k.dtype)
    if mask is None:
        return logits
    allowed = mask if mask.shape[0] == 1 else mask[rows]
    if allowed.shape[2] > 1:
        allowed = allowed.repeat_interleave(k.shape[1] // allowed.shape[2], dim=2)
    return logits.masked_fill(~allowed[..., None], -math.inf)


def weighted_mean(
    k: Float[Tensor, "S N H"],
    v: Float[Tensor, "S N H E"],
    bias: Float[Tensor, "H T S"],
    mask: Bool[Tensor, "#T S _"] | None,
) -> tuple[Float[Tensor, "T N H E"], Float[Tensor, "T N H"]]:
    r"""Compute the mean $\mu$ and the log-denominator $\ell$ of every row, block by block.

    A row that may read nothing has mean 0 and $\ell = \infty$, which makes all its weights 0 later.
    Cost: $T S N H E$ time, $T N H E$ memory.
    """
    length = bias.shape[1]
    mean = v.new_zeros(length, *v.shape[1:])
    log_den = k.new_full((length, *k.shape[1:]), math.inf)
    if 0 in (length, k.numel(), v.numel()):
        return mean, log_den
    for rows in _row_blocks(length, v.numel()):
        logits = _logits(k, bias, mask, rows)
        top = logits.amax(dim=1, keepdim=True)
        p = torch.exp(logits - top.masked_fill(top == -math.inf, 0.0))
        den = p.sum(dim=1)
        empty = den == 0
        log_den[rows] = (top.squeeze(1) + den.log()).masked_fill(empty, math.inf)
        num = (p[..., None] * v).sum(dim=1)
        mean[rows] = num / den.masked_fill(empty, 1.0)[..., None]
    return mean, log_den


# With $\delta_{t,s} = p_{t,s}\,\langle g_t, v_s - \mu_t\rangle$ the gradients are those of any softmax: $g$
# reaches the values through $p$, and $\delta$ is summed over rows for keys and over channels for biases.
def weighted_mean_gradients(
    g: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, mean: Tensor, log_den: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Gradients of `weighted_mean` with respect to keys, values and biases, weights recomputed."""
    dk, dv, dbias = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(bias, dtype=k.dtype)
    if 0 in (bias.shape[1], k.numel(), v.numel()):
        return dk, dv, dbias
    for rows in _row_blocks(bias.shape[1], v.numel()):
        p = torch.exp(_logits(k, bias, mask, rows) - log_den[rows][:, None])
        dv += (p[..., None] * g[rows][:, None]).sum(dim=0)
        delta = p * (g[rows][:, None] * (v[None] - mean[rows][:, None])).sum(dim=-1)
        dk += delta.sum(dim=0)
        dbias[:, rows] = delta.sum(dim=2).permute(2, 0, 1)
    return dk, dv, dbias


# ## One differentiable function
#
# The loops above are hidden from the compiler as one operation: traced, they would unroll into one piece of
# graph for each block of rows.
# The signature is written out: wrappers such as the shape checks of the tests hide the annotations.
@torch.library.custom_op(
    "postil::aft_log_space",
    mutates_args=(),
    schema="(Tensor k, Tensor v, Tensor bias, Tensor? mask) -> (Tensor, Tensor)",
)
def _forward_op(k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return weighted_mean(k, v, bias, mask)


@_forward_op.register_fake
def _(k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = bias.shape[1]
    return v.new_empty(rows, *v.shape[1:]), k.new_empty(rows, *k.shape[1:])


@torch.library.custom_op(
    "postil::aft_log_space_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor k, Tensor v, Tensor bias, Tensor? mask, Tensor mean, Tensor log_den)"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    g: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, mean: Tensor, log_den: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return weighted_mean_gradients(g, k, v, bias, mask, mean, log_den)


@_backward_op.register_fake
def _(
    g: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, mean: Tensor, log_den: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(k), torch.empty_like(v), torch.empty_like(bias, dtype=k.dtype)


# Gradients of gradients are rare and need no speed. They come from the definition, differentiated by PyTorch.
def _literal_gradients(
    g: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    def mean(k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        logits = _logits(k, bias, mask, slice(None))
        empty = (logits == -math.inf).all(dim=1, keepdim=True)
        p = logits.masked_fill(empty, 0.0).softmax(dim=1).masked_fill(empty, 0.0)
        return torch.einsum("tsnh,snhe->tnhe", p, v)

    return torch.func.vjp(mean, k, v, bias)[1](g)


class _Gradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        g: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, mean: Tensor, log_den: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _backward_op(g, k, v, bias, mask, mean, log_den)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        g, k, v, bias, mask = ctx.saved_tensors

        def first(g: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return _literal_gradients(g, k, v, bias, mask)

        return (*torch.func.vjp(first, g, k, v, bias)[1](gradients), None, None, None)


class _Mean(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _forward_op(k, v, bias, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        k, v, bias, mask, mean, log_den = ctx.saved_tensors
        return (*_Gradients.apply(gradients[0], k, v, bias, mask, mean, log_den), None)


def log_space_mean(
    k: Float[Tensor, "S N H"],
    v: Float[Tensor, "S N H E"],
    bias: Float[Tensor, "H T S"],
    mask: Bool[Tensor, "#T S _"] | None = None,
) -> Float[Tensor, "T N H E"]:
    r"""The mean $\mu$ for any biases and any mask, differentiable, gradients of gradients included.

    `N` runs over everything that shares biases (batch, and channels that have a key each); `E` channels share
    one key. A mask of `M` columns holds for `N / M` neighbours each.
    Cost: $T S N H E$ time, $T N H E$ memory forward and backward.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    return _Mean.apply(k.to(wide), v.to(wide), bias.to(wide), mask)[0].to(v.dtype)


def one_sample_at_a_time(op: Any) -> None:
    r"""Teach an operation `torch.func.vmap`: run it for each sample and stack."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        def sample(i: int) -> list[Any]:
            pairs = zip(arguments, in_dims, strict=True)
            return [x.select(dim, i) if isinstance(dim, int) else x for x, dim in pairs]

        columns = zip(*(op(*sample(i)) for i in range(info.batch_size)), strict=True)
        outputs = tuple(torch.stack(column) for column in columns)
        return outputs, (0,) * len(outputs)

    op.register_vmap(rule)


one_sample_at_a_time(_forward_op)
one_sample_at_a_time(_backward_op)

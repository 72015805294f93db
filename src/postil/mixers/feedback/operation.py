r"""The recurrence as one operation that autograd, `torch.compile` and `torch.func` can use.

The pages before this one compute a whole sequence, forward and backward. This page only makes one
differentiable function of the two, `feedback_transformer`, with the signature of the literal form.

A backward pass written by hand is itself not differentiable. That matters to whoever asks for second
derivatives, and then only: where a gradient is asked for *with a graph*, it is computed by differentiating
the literal form instead. Slow, exact, and nobody has to say anything.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from postil.mixers.feedback import kernel, plain
from postil.mixers.feedback.backward import backward
from postil.mixers.feedback.recurrence import (
    FeedbackWeights,
    FoldedWeights,
    Memory,
    Noise,
    feedback_transformer_reference,
    fold,
    unfold,
)

__all__ = ["feedback_transformer"]


def feedback_transformer(
    x: Float[Tensor, "T B D"],
    weights: FeedbackWeights,
    memory: Memory | None = None,
    allowed: Bool[Tensor, "#T S #B"] | None = None,
    window: int | None = None,
    noise: Noise | None = None,
    *,
    recompute: bool = False,
) -> tuple[Float[Tensor, "T B D"], Memory]:
    r"""Compute the recurrence of `feedback_transformer_reference`, forward and backward by hand.

    Folding moves everything that does not depend on the position out of the loop, $W(g \odot n + \beta) =
    (W \operatorname{diag} g) n + W\beta$; the loop then does $L$ times attention and feed-forward a step;
    backward keeps only the chain of $\delta h$ and $\delta m$ sequential and sums all weight gradients
    $\delta Y^\top N$ in chunks. Half precision is computed in single precision.

    Source: [fan2020], Section 3. Deviation: none from the literal form.
    Cost: $L (12 D^2 + S D)$ multiplications a position and three times that with backward;
    $T B L (4 D + d_{ff} + H S)$ numbers are kept for backward. With `recompute` the last term is not kept:
    backward computes the probabilities again, with $2 L S D$ multiplications a position.
    """
    precise = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    if x.dtype != precise:
        weights = weights._replace(
            **{name: w.to(precise) for name, w in weights._asdict().items() if w is not None}
        )
        memory = None if memory is None else (memory[0].to(precise), memory[1].to(precise))
        noise = None if noise is None else Noise(*(n.to(precise) for n in noise))
    # Nothing at all, or one position with nothing to read, is no recurrence.
    if x.numel() == 0 or (x.shape[0] == 1 and memory is None):
        compute = feedback_transformer_reference
    else:
        compute = partial(_recurrence, recompute=recompute)
    # Autocast would round the products, of the weights as well, to half precision. It is kept out.
    with torch.autocast(x.device.type, enabled=False):
        y, (keys, values) = compute(x.to(precise), weights, memory, allowed, window, noise)
    return y.to(x.dtype), (keys.to(x.dtype), values.to(x.dtype))


def _recurrence(
    x: Tensor,
    weights: FeedbackWeights,
    memory: Memory | None,
    allowed: Tensor | None,
    window: int | None,
    noise: Noise | None,
    recompute: bool,
) -> tuple[Tensor, Memory]:
    if memory is None:
        empty = x.new_empty(0, x.shape[1], weights.key_value.shape[0], *weights.query_pos_bias.shape[1:])
        memory = empty, empty
    reach = memory[0].shape[0] + x.shape[0]
    folded = fold(weights)
    # Where no gradient will be asked for, nothing is kept either.
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *memory, *folded))
    # Inside, the heads come first and time runs along the rows of a matrix.
    y, keys, values = Recurrence.apply(
        x,
        memory[0].permute(2, 3, 1, 0, 4),
        memory[1].permute(2, 3, 1, 0, 4),
        allowed,
        reach if window is None else min(window, reach),
        weights.memory_gain is not None,
        learns and not recompute,
        *folded,
        *(noise or ()),
    )[:3]
    if weights.final_gain is not None:
        y = F.layer_norm(y, y.shape[-1:], weights.final_gain, weights.final_shift)
    return y, (keys.permute(3, 2, 0, 1, 4), values.permute(3, 2, 0, 1, 4))


FOLDED = len(FoldedWeights._fields)


# ## Two opaque operations
#
# A tracer that looked inside would unroll $T \times L$ steps. Registered as operations, forward and backward
# are one node each, and the shapes of their results are all it needs to know.
PROBLEM = (
    "Tensor x, Tensor keys, Tensor values, Tensor? allowed, int window, bool norm_memory, bool keep, "
    "Tensor[] weights, Tensor[] noise"
)


def _problem(x: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> plain.Problem:
    allowed, window, norm_memory, keep, weights, noise = rest
    return plain.Problem(x, keys, values, allowed, noise, FoldedWeights(*weights), window, norm_memory, keep)


# Backward may run under an autocast that forward was kept from.
@torch.library.custom_op("postil::feedback_forward", mutates_args=(), schema=f"({PROBLEM}) -> Tensor[]")
def _forward(x: Tensor, *operands: Any) -> list[Tensor]:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        problem = _problem(x, *operands)
        compute = kernel.forward if kernel.fits(problem) else plain.forward
        y, keys, values, tape = compute(problem)
        return [y, keys, values, *tape]


@_forward.register_fake
def _(x: Tensor, keys: Tensor, values: Tensor, *operands: Any) -> list[Tensor]:
    groups, heads, batch, count, width = keys.shape
    memory = [x.new_empty(groups, heads, batch, count + x.shape[0], width) for _ in range(2)]
    problem = _problem(x, keys, values, *operands)
    blank_tape = kernel.blank_tape if kernel.fits(problem) else plain.blank_tape
    return [torch.empty_like(x), *memory, *blank_tape(problem, x.new_empty)]


@torch.library.custom_op(
    "postil::feedback_backward",
    mutates_args=(),
    schema=f"(Tensor[] grads, Tensor[] results, {PROBLEM}) -> Tensor[]",
)
def _backward(grads: list[Tensor], results: list[Tensor], x: Tensor, *operands: Any) -> list[Tensor]:
    outputs, keys, values, *tape = results
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        problem = _problem(x, *operands)
        compute = kernel.backward if kernel.fits(problem) else backward
        dx, dk, dv, dw = compute(
            problem, plain.Tape(*tape), outputs, (keys, values), grads[0], (grads[1], grads[2])
        )
        return [dx, dk.contiguous(), dv.contiguous(), *dw]


@_backward.register_fake
def _(grads: list[Tensor], results: list[Tensor], *operands: Any) -> list[Tensor]:
    problem = _problem(*operands)
    return [t.new_empty(t.shape) for t in (problem.x, problem.keys, problem.values, *problem.weights)]


class Recurrence(torch.autograd.Function):
    r"""The two operations, joined; the operands are the folded weights, then the noise if there is any."""

    @staticmethod
    def forward(
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        allowed: Tensor | None,
        window: int,
        norm_memory: bool,
        keep: bool,
        *operands: Tensor,
    ) -> tuple[Tensor, ...]:
        r"""Give outputs, all keys and values, and the tape."""
        weights, noise = list(operands[:FOLDED]), list(operands[FOLDED:])
        return tuple(_forward(x, keys, values, allowed, window, norm_memory, keep, weights, noise))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        r"""Keep what backward needs; the tape is nobody's result."""
        x, keys, values, allowed = inputs[:4]
        ctx.rules, operands = inputs[4:7], inputs[7:]
        ctx.mark_non_differentiable(*output[3:])
        # Else autograd would make zeros as large as the tape, to say that it has no gradient.
        ctx.set_materialize_grads(False)
        ctx.count = len(operands)
        ctx.save_for_backward(x, keys, values, allowed, *operands, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        r"""Compute all gradients by hand, or by the literal form where they must be differentiable."""
        x, keys, values, allowed, *rest = ctx.saved_tensors
        operands, results = rest[: ctx.count], rest[ctx.count :]
        given_grads = zip(grads[:3], results[:3], strict=True)
        grads = tuple(torch.zeros_like(r) if g is None else g for g, r in given_grads)
        if torch.is_grad_enabled():
            given = _literal_gradients(grads, (x, keys, values), operands, allowed, *ctx.rules[:2])
        else:
            weights, noise = operands[:FOLDED], operands[FOLDED:]
            given = _backward(list(grads), results, x, keys, values, allowed, *ctx.rules, weights, noise)
        return *given[:3], None, None, None, None, *given[3:], *[None] * (ctx.count - FOLDED)

    # One problem of the batch after the other: `vmap` is for convenience here, not for speed.
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        r"""Map over a batch of problems by computing each."""
        results = [
            Recurrence.apply(
                *(x if d is None else x.select(d, i) for x, d in zip(inputs, in_dims, strict=True))
            )
            for i in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, tuple(0 for _ in stacked)


def _literal_gradients(
    grads: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    operands: list[Tensor],
    allowed: Tensor | None,
    window: int,
    norm_memory: bool,
) -> tuple[Tensor, ...]:
    noise = Noise(*operands[FOLDED:]) if len(operands) > FOLDED else None

    def literal(x: Tensor, keys: Tensor, values: Tensor, *folded: Tensor) -> tuple[Tensor, ...]:
        memory = keys.permute(3, 2, 0, 1, 4), values.permute(3, 2, 0, 1, 4)
        weights = unfold(FoldedWeights(*folded), norm_memory)
        y, memory = feedback_transformer_reference(x, weights, memory, allowed, window, noise)
        return y, *(rows.permute(2, 3, 1, 0, 4) for rows in memory)

    return torch.func.vjp(literal, *inputs, *operands[:FOLDED])[1](grads)

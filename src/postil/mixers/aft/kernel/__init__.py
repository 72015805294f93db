r"""The compiled form: how the kernel is called.

`aft.cpp` beside this page computes what `walk` and `walk_back` compute, on the same tensors, in single
precision, where a key has one value and only the keys of a window before a query have a bias. It is compiled
on the machine that runs it (`postil.kernels`). Where that is not possible, or a problem is of another kind,
the plain form computes it.

The plain form writes its sums to memory and reads them again several times over. Here the sums of eight rows
are kept in registers, for sixteen columns at a time, and memory is read and written once, in long stretches.
Row by row the sums run in the order of time, so that nothing that follows a row can move a bit of it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from postil.kernels import Kernel, call_structure
from postil.mixers.aft.walk import Reach
from postil.mixers.aft.walk_back import Gradients, Outcome

__all__ = ["KERNEL", "ROWS", "fits", "pull", "push"]

FILES = ("aft.cpp", "forward.h", "backward.h", "problem.h")
# Rows that share a reference: `CHUNK` of `problem.h`.
ROWS = 64
# Fewer numbers than this are computed sooner than a second thread starts, so they get one.
FEW = 1 << 16

KERNEL = Kernel(
    of="Attention Free Transformer",
    slower="a tenth to a third slower in a layer",
    sources=[Path(__file__).parent / name for name in FILES],
)
"""The library, built and loaded when it is first asked for."""

# fmt: off
_Call = call_structure(
    ("length", "keys", "start", "columns", "left", "rows", "listed", "blocks", "threads"),
    ("q", "k", "v", "near", "beyond", "y", "den", "references", "g", "dq", "dk", "dv", "dnear"),
)
# fmt: on


def fits(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, reach: Reach) -> bool:
    r"""Say whether the kernel computes this: float32 on the CPU, one value a key, a band of past biases.

    The first problem that fits makes the kernel be built.
    """
    return (
        reach.skewed
        and reach.causal
        and reach.right == 0
        and q.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype == bias.dtype == torch.float32
        and tuple(q.shape[2:]) == (1, 1)
        and bias.shape[2] % 8 == 0
        and KERNEL.available()
    )


def _call(
    function: str, operands: tuple[Tensor, ...], near: Tensor, beyond: Tensor, reach: Reach, **rest: Tensor
) -> None:
    q, k, v = (x.contiguous() for x in operands)
    near, beyond = near.contiguous(), beyond.contiguous()
    _, blocks, rows, listed = near.shape
    held = {"q": q, "k": k, "v": v, "near": near, "beyond": beyond} | rest
    call = _Call(
        length=q.shape[0],
        keys=k.shape[0],
        start=reach.start,
        columns=q.shape[1],
        left=reach.left,
        rows=rows,
        listed=listed,
        blocks=blocks,
        threads=_threads(q),
        **{name: tensor.data_ptr() for name, tensor in held.items()},
    )
    KERNEL.call(function, call)


def _threads(q: Tensor) -> int:
    return torch.get_num_threads() if q.numel() >= FEW else 1


def push(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    beyond: Tensor,
    reach: Reach,
    y: Tensor,
    den: Tensor,
) -> Tensor:
    r"""Compute what `walk.push` computes; return the references, `[ceil(T / 64), N, 1]`."""
    references = den.new_empty(-(-q.shape[0] // ROWS), *den.shape[1:])
    _call("aft_forward", (q, k, v), near, beyond, reach, y=y, den=den, references=references)
    return references


def pull(
    rows: Outcome,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    beyond: Tensor,
    references: Tensor,
    reach: Reach,
    into: Gradients,
) -> Tensor:
    r"""Compute what `walk_back.pull` computes; return the gradients of the near weights, as `near`."""
    gradient = near.new_zeros(_threads(rows.q), *near.shape[1:])
    _call(
        "aft_backward",
        (rows.q, k, v),
        near,
        beyond,
        reach,
        g=rows.g.contiguous(),
        y=rows.y.contiguous(),
        den=rows.den.contiguous(),
        references=references.contiguous(),
        dq=into.q,
        dk=into.k,
        dv=into.v,
        dnear=gradient,
    )
    # Keys that come after every query are read by none.
    unread = reach.start + rows.q.shape[0]
    into.k[unread:], into.v[unread:] = 0.0, 0.0
    return gradient.sum(0, keepdim=True)

r"""The compiled form: how the kernel is called.

`feedback.cpp` beside this page computes the same recurrence as the plain form, on the same tensors, in single
precision. It is compiled on the machine that runs it (`build.py`), for exactly this processor. Where that is
not possible, or a problem is of a kind the kernel was not written for, the plain form computes it.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from postil.kernels import LANES, call_structure
from postil.mixers.feedback import plain
from postil.mixers.feedback.backward import memory_weights, start_debts
from postil.mixers.feedback.kernel.build import KERNEL
from postil.mixers.feedback.kernel.decoding import step, steps
from postil.mixers.feedback.plain import CHUNK, Problem, Tape, room
from postil.mixers.feedback.recurrence import FoldedWeights

__all__ = [
    "KERNEL",
    "backward",
    "blank_tape",
    "fits",
    "forward",
    "step",
    "steps",
]

PAGES_FROM = 1 << 18

# ## The call
#
# One structure carries everything; its fields are those of `problem.h`, in the same order.
# fmt: off
SIZES = (
    "T", "B", "D", "F", "L", "H", "E", "G", "carried", "R", "window", "norm_memory", "mask_rows",
    "mask_batch", "threads",
)
POINTERS = (
    "allowed", "x", "query", "query_bias", "positions", "position_bias", "output", "output_bias",
    "layer1", "layer1_bias", "layer2", "layer2_bias", "mixing", "key_value", "key_value_bias",
    "y", "keys", "values", "inputs", "middles", "hidden", "attended", "queries", "probabilities",
    "mixed", "mixed_rstd", "dy", "dkeys", "dvalues", "dx", "dmixed", "dkey_value",
)
GRADIENTS = (
    "dquery", "dquery_bias", "dpositions", "dposition_bias", "doutput", "doutput_bias",
    "dlayer1", "dlayer1_bias", "dlayer2", "dlayer2_bias",
)
# fmt: on


_Call = call_structure(SIZES, POINTERS + GRADIENTS)


def _call(function: str, p: Problem, **tensors: Tensor | None) -> None:
    (length, batch, width), (layers, hidden) = p.x.shape, p.weights.layer1.shape[:2]
    groups, heads, _, carried, head_width = p.keys.shape
    # The structure holds addresses; the tensors must outlive the call.
    held = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    held |= {name: tensor.contiguous() for name, tensor in p.weights._asdict().items()}
    held["x"] = p.x.contiguous()
    rows, columns = 1, 1
    if p.allowed is not None:
        held["allowed"] = p.allowed.contiguous()
        rows, _, columns = p.allowed.shape
    call = _Call(
        T=length,
        B=batch,
        D=width,
        F=hidden,
        L=layers,
        H=heads,
        E=head_width,
        G=groups,
        carried=carried,
        R=p.weights.positions.shape[2],
        window=p.window,
        norm_memory=p.norm_memory,
        mask_rows=rows,
        mask_batch=columns,
        threads=torch.get_num_threads(),
        **{name: tensor.data_ptr() for name, tensor in held.items() if tensor.numel()},
    )
    KERNEL.call(function, call)


def fits(p: Problem) -> bool:
    r"""Say whether the kernel computes this: float32 on the CPU, no dropout, widths in multiples of 16.

    The first problem that fits makes the kernel be built.
    """
    sizes = (p.x.shape[2], p.weights.layer1.shape[1], p.keys.shape[-1])
    return (
        p.x.device.type == "cpu"
        and p.x.dtype == torch.float32
        and not p.noise
        and p.x.numel() > 0
        and all(size % LANES == 0 for size in sizes)
        and KERNEL.available()
    )


# The table has room for rows of equal length. The kernel packs them more closely (`problem.h`), so the end of
# the table is never written to, and memory that is never written to costs nothing.
def blank_tape(p: Problem, new: Callable[..., Tensor]) -> Tape:
    r"""Make room for what the kernel's forward leaves, by `new`."""
    span = p.carried + p.x.shape[0]
    columns = span + 2 * CHUNK if p.window >= span else p.window + 4 * CHUNK
    return plain.blank_tape(p, new, columns)


# Large tables lie on large pages, which stay with the process when their tensor goes (`pages.h`).
def _pages(*size: int) -> Tensor:
    count = math.prod(size)
    if count < PAGES_FROM:
        return torch.empty(size)
    loaded = KERNEL.library()
    assert isinstance(loaded, ctypes.CDLL)
    address = loaded.feedback_take(count)
    if not address:
        raise MemoryError(f"no room for a table of {4 * count} bytes")
    table = (ctypes.c_float * count).from_address(address)
    weakref.finalize(table, loaded.feedback_give, ctypes.c_void_p(address)).atexit = False
    return torch.frombuffer(table, dtype=torch.float32).view(size)


def forward(p: Problem) -> tuple[Tensor, Tensor, Tensor, Tape]:
    r"""Compute what `plain.forward` computes."""
    keys, values = room(p.keys, len(p.x)), room(p.values, len(p.x))
    tape, outputs = blank_tape(p, _pages), p.x.new_empty(p.x.shape)
    _call("feedback_forward", p, y=outputs, keys=keys, values=values, **tape._asdict())
    return outputs, keys, values, tape


def backward(
    p: Problem,
    tape: Tape,
    outputs: Tensor,
    memory: tuple[Tensor, Tensor],
    grad: Tensor,
    grad_memory: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, FoldedWeights]:
    r"""Compute what the plain backward computes."""
    debts, dw, dx = start_debts(p, tape, grad_memory)
    _call(
        "feedback_backward",
        p,
        keys=memory[0],
        values=memory[1],
        dy=grad,
        dkeys=debts.keys,
        dvalues=debts.values,
        dx=dx,
        dmixed=debts.mixed,
        dkey_value=debts.key_value,
        **tape._asdict(),
        **{f"d{name}": tensor for name, tensor in dw._asdict().items() if f"d{name}" in GRADIENTS},
    )
    memory_weights(tape, outputs, debts, dw)
    return dx, debts.keys[:, :, :, : p.carried], debts.values[:, :, :, : p.carried], dw

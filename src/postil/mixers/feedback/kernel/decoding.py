r"""One position, compiled.

A step of one row multiplies it once with every weight of the model, so a step is as fast as the weights come
from memory. They are neither folded nor packed, but read where they lie: the plan of the plain form says
which tensors they are, and this page where those are.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from postil.kernels import LANES, call_structure
from postil.mixers.feedback.decoding import Operands, Plan
from postil.mixers.feedback.kernel.build import KERNEL
from postil.mixers.feedback.memory import FeedbackState

__all__ = ["step", "steps"]

# The fields of the structure of `step.h`, in the same order.
SIZES = (
    "B", "D", "F", "L", "H", "E", "G", "S", "positions", "at_position", "at_row", "at_group", "at_head",
)  # fmt: skip
POINTERS = (
    "layers", "projections", "real", "x", "keys", "values", "mixing", "memory_gain", "memory_shift",
    "final_gain", "final_shift", "y", "new_keys", "new_values",
)  # fmt: skip


_Step = call_structure(SIZES, POINTERS)

MANY = 8


# ## What is kept
#
# A call holds as long as the parameters of its plan lie where they lay: `.to()` moves them and leaves them
# the same tensors.
class Call(NamedTuple):
    r"""Where everything lies; no structure where the kernel cannot read it."""

    addresses: list[int]
    tables: tuple[ctypes.Array[Any], ctypes.Array[Any]]
    structure: ctypes.Structure | None


_calls: weakref.WeakKeyDictionary[Plan, Call] = weakref.WeakKeyDictionary()


def _call(plan: Plan) -> Call:
    addresses = [tensor.data_ptr() for tensor in plan.operands.tensors]
    known = _calls.get(plan)
    if known is not None and known.addresses == addresses:
        return known
    made = _calls[plan] = _made(plan.operands, addresses)
    return made


def _made(found: Operands, addresses: list[int]) -> Call:
    tables = _addresses(found.layers), _addresses(found.projections)
    first = found.layers[0]
    (heads, width), hidden = first.query_pos_bias.shape, first.layer1.shape[0]
    readable = (
        all(size % LANES == 0 for size in (heads * width, hidden, width))
        and all(t.is_cpu and t.dtype == torch.float32 and t.is_contiguous() for t in found.tensors)
        and KERNEL.available()
    )
    if not readable:
        return Call(addresses, tables, None)
    gain, shift = found.memory or (None, None)
    call = _Step(
        D=heads * width,
        F=hidden,
        L=len(found.layers),
        H=heads,
        E=width,
        G=len(found.projections),
        positions=first.key_pos_embeddings.shape[0],
        layers=ctypes.addressof(tables[0]),
        projections=ctypes.addressof(tables[1]),
        memory_gain=None if gain is None else gain.data_ptr(),
        memory_shift=None if shift is None else shift.data_ptr(),
        final_gain=found.final[0].data_ptr(),
        final_shift=found.final[1].data_ptr(),
    )
    return Call(addresses, tables, call)


def _addresses(rows: Sequence[Sequence[Tensor | None]]) -> ctypes.Array[Any]:
    found = [None if t is None else t.data_ptr() for row in rows for t in row]
    return (ctypes.c_void_p * len(found))(*found)


# Many rows would each read all weights again; from eight on, the library's products are the better way.
def steps(plan: Plan, x: Tensor, state: FeedbackState) -> bool:
    r"""Say whether the kernel computes this step: float32 on the CPU, few rows, widths in multiples of 16.

    A state may have any layout that tells its rows apart. The first step that fits makes the kernel be built.
    """
    keys, values, real = state.keys, state.values, state.real
    strides = keys.stride()
    return (
        x.is_cpu
        and x.dtype == keys.dtype == values.dtype == torch.float32
        and 0 < x.shape[0] < MANY
        and strides == values.stride()
        and strides[-1] == 1
        and 0 not in strides
        and (real is None or real.is_contiguous())
        and _call(plan).structure is not None
    )


# All addresses are counted in Python, which is cheaper than a tensor made for each.
def step(plan: Plan, x: Tensor, state: FeedbackState, count: int, mixing: Tensor) -> Tensor:
    r"""Compute what the plain `step` computes, where `steps` has said that it can be done."""
    keys, values, real = state.keys, state.values, state.real
    strides, now = keys.stride(), state.stop - 1
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    # Several threads may step at once, so each has a structure of its own.
    call = _Step.from_buffer_copy(_calls[plan].structure)  # type: ignore[arg-type]
    call.B, call.S = x.shape[0], count
    call.at_position, call.at_row, call.at_group, call.at_head, _ = strides
    call.x, call.y, call.mixing = x.data_ptr(), y.data_ptr(), mixing.data_ptr()
    first, row = 4 * strides[0] * (now - count), 4 * strides[0] * now
    call.keys, call.new_keys = keys.data_ptr() + first, keys.data_ptr() + row
    call.values, call.new_values = values.data_ptr() + first, values.data_ptr() + row
    if real is not None:
        call.real = real.data_ptr() + (now - count) * x.shape[0]
    KERNEL.call("feedback_step", call)
    return y

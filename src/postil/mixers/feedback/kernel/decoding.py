r"""One position, compiled.

A step of one row multiplies it once with every weight of the model, so a step is as fast as the weights come
from memory. They are neither folded nor packed, but read where they lie: whatever happens to a model between
two steps, the next one computes with what is there.

What is worth keeping between steps is where everything lies. In Python, finding the parameters of six layers
takes as long as multiplying with them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from postil.kernels import LANES, call_structure
from postil.mixers.feedback.kernel.build import KERNEL
from postil.mixers.feedback.memory import FeedbackState

__all__ = ["Operands", "Plan", "plan", "reads", "step"]

# The fields of the structure of `step.h`, in the same order.
SIZES = (
    "B", "D", "F", "L", "H", "E", "G", "S", "positions", "at_position", "at_row", "at_group", "at_head",
)  # fmt: skip
POINTERS = (
    "layers", "projections", "real", "x", "keys", "values", "mixing", "memory_gain", "memory_shift",
    "final_gain", "final_shift", "y", "new_keys", "new_values",
)  # fmt: skip


_Step = call_structure(SIZES, POINTERS)


class Operands(NamedTuple):
    r"""The parameters of a model, of layers, projections and norms, in the order of `step.h`."""

    layers: Sequence[Sequence[Tensor]]
    projections: Sequence[Sequence[Tensor | None]]
    norms: Mapping[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        r"""All of them, one after the other."""
        rows = [t for row in (*self.layers, *self.projections) for t in row if t is not None]
        return [*rows, *self.norms.values()]


# ## What is kept
#
# A plan holds as long as the model is put together from the very same parts, and its parameters lie where
# they lay. What is *in* them may change; `.to()`, an exchanged layer or another activation ends the plan.
class Plan(NamedTuple):
    r"""Where everything lies, and how to find out whether it still does."""

    links: list[tuple[dict[str, Any], str, Any]]
    parameters: list[Tensor]
    addresses: list[int]
    tables: tuple[ctypes.Array[Any], ctypes.Array[Any]]
    call: ctypes.Structure

    def holds(self) -> bool:
        r"""Say whether the model is still what the plan was made for."""
        for owner, name, part in self.links:
            if owner.get(name) is not part:
                return False
        return [parameter.data_ptr() for parameter in self.parameters] == self.addresses


_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def plan(model: nn.Module, operands: Callable[[], Operands | None]) -> Plan | None:
    r"""Give the plan of a model, or `None` where the kernel does not compute its steps.

    `operands` is asked when there is no plan that holds.
    """
    known = _plans.get(model)
    if known is not None and known.holds():
        return known
    found = operands()
    if found is None or not KERNEL.available():
        return None
    tensors = found.tensors
    sizes = (found.layers[0][0].shape[0], found.layers[0][10].shape[0], found.layers[0][3].shape[1])
    if any(size % LANES for size in sizes) or not all(
        t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors
    ):
        return None
    made = Plan(_links(model), tensors, [t.data_ptr() for t in tensors], *_call(found))
    # What was computed for this step, by a parametrization for one, lies elsewhere the next time.
    own = {id(parameter) for parameter in model.parameters()}
    if all(id(t) in own for t in tensors):
        _plans[model] = made
    return made


def _links(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    links = []
    for module in model.modules():
        attributes = vars(module)
        # Whether a module is in training mode matters only where it has a dropout.
        names = ("activation", "p", *(["training"] if "dropout" in module._modules else []))
        rules = {name: attributes[name] for name in names if name in attributes}
        for owner, parts in (
            (attributes, rules),
            (module._modules, module._modules),
            (module._parameters, module._parameters),
        ):
            links += [(owner, name, part) for name, part in parts.items()]
    return links


def _call(found: Operands) -> tuple[tuple[ctypes.Array[Any], ctypes.Array[Any]], ctypes.Structure]:
    tables = _addresses(found.layers), _addresses(found.projections)
    heads, head_width = found.layers[0][3].shape
    call = _Step(
        D=heads * head_width,
        F=found.layers[0][10].shape[0],
        L=len(found.layers),
        H=heads,
        E=head_width,
        G=len(found.projections),
        positions=found.layers[0][4].shape[0],
        layers=ctypes.addressof(tables[0]),
        projections=ctypes.addressof(tables[1]),
        **{name: tensor.data_ptr() for name, tensor in found.norms.items()},
    )
    return tables, call


def _addresses(rows: Sequence[Sequence[Tensor | None]]) -> ctypes.Array[Any]:
    found = [None if t is None else t.data_ptr() for row in rows for t in row]
    return (ctypes.c_void_p * len(found))(*found)


def reads(state: FeedbackState) -> bool:
    r"""Say whether a state lies in memory as the kernel reads it: any layout that tells its rows apart."""
    keys, values, real = state.keys, state.values, state.real
    strides = keys.stride()
    return (
        keys.dtype == values.dtype == torch.float32
        and keys.is_cpu
        and values.is_cpu
        and strides == values.stride()
        and strides[-1] == 1
        and 0 not in strides
        and (real is None or real.is_contiguous())
    )


# All addresses are counted in Python, which is cheaper than a tensor made for each.
def step(plan: Plan, x: Tensor, state: FeedbackState, count: int, mixing: Tensor) -> Tensor:
    r"""Compute one position, which reads `count` memories; write its own into the last row of `state`."""
    keys, values, real = state.keys, state.values, state.real
    strides, now = keys.stride(), state.stop - 1
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    # Several threads may step at once, so each has a structure of its own.
    call = _Step.from_buffer_copy(plan.call)
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

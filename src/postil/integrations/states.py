r"""States as trees of tensors, for tools that know nothing about mixers.

Beam search picks rows out of a state; an exporter wants its tensors one by one. Neither should know which
mixer made it. A state is nested tuples of tensors and whole numbers, so it can be walked; which axis of a
tensor is the batch is found by looking: it is the axis that differs between a batch of two and one of three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postil.language_model import LanguageModel
from postil.mixer import State
from postil.sampling import evaluating

__all__ = ["Layout", "batch_axes", "layout_of", "leaves", "map_leaves", "probe", "select_rows"]


def map_leaves(function: Callable[..., Any], state: State, *others: State) -> Any:
    r"""Apply a function to each leaf of a state, or of several that have the same form; keep the form."""
    if not isinstance(state, tuple):
        return function(state, *others)
    parts = [map_leaves(function, *parts) for parts in zip(state, *others, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def leaves(state: State) -> list[Any]:
    r"""List the leaves of a state from left to right."""
    return [leaf for part in state for leaf in leaves(part)] if isinstance(state, tuple) else [state]


def probe(model: LanguageModel, batch: int, length: int) -> State:
    r"""Give the state after `length` tokens: an example of its form."""
    device = next(model.parameters()).device
    with evaluating(model):
        return model.prefill(torch.zeros(batch, length, dtype=torch.int64, device=device))[1]


def batch_axes(model: LanguageModel) -> State:
    r"""Say for each leaf of the model's state which axis is the batch, `None` for what all rows share.

    Cost: a pass over five tokens.
    """
    return map_leaves(_different_axis, probe(model, 2, 1), probe(model, 3, 1))


def _different_axis(first: Any, second: Any) -> int | None:
    if not isinstance(first, Tensor):
        return None
    sizes = zip(first.shape, second.shape, strict=True)
    return next((axis for axis, (one, other) in enumerate(sizes) if one != other), None)


# What all rows share is copied too: it may count rows of a buffer that the new state does not have.
def select_rows(state: State, axes: State, rows: Tensor) -> State:
    r"""Take rows of a state, in any order and any number of times each."""

    def select(leaf: Any, axis: int | None) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.clone() if axis is None else leaf.index_select(axis, rows.to(leaf.device))

    return map_leaves(select, state, axes)


# ## The state as a list
#
# A graph knows tensors only. Numbers in a state are of three kinds: the length of a tensor beside them, the
# number of tokens read, or constants. Two states of different lengths tell which is which.
@dataclass(frozen=True)
class Layout:
    r"""Names and axes of a state's tensors: `B` is the batch, `S` grows with the tokens read."""

    names: tuple[str, ...]
    axes: tuple[tuple[str | int, ...], ...]
    assemble: Callable[[tuple[Tensor, ...], Any], State]
    """From tensors and the number of tokens read to a state."""

    @property
    def growing(self) -> tuple[int | None, ...]:
        r"""Give for each tensor the axis that grows with the text, `None` where none does."""
        return tuple(axes.index("S") if "S" in axes else None for axes in self.axes)


SHORT, LONG = 3, 5


def layout_of(model: LanguageModel) -> Layout:
    r"""Find out the layout of a model's states.

    Raises:
        ValueError: a number in a state is neither constant nor the length of the text or of a tensor.
    """
    short, long, batch = probe(model, 2, SHORT), probe(model, 2, LONG), batch_axes(model)
    named = dict(zip(_names(short), zip(*map(leaves, (short, long, batch)), strict=True), strict=True))
    kept = {name: parts for name, parts in named.items() if parts[2] is not None}
    axes = tuple(
        tuple(
            "B" if axis == b else "S" if sizes == (SHORT, LONG) else sizes[0]
            for axis, sizes in enumerate(zip(one.shape, other.shape, strict=True))
        )
        for one, other, b in kept.values()
    )
    lengths = {name: shape.index("S") for name, shape in zip(kept, axes, strict=True) if "S" in shape}

    def assemble(tensors: tuple[Tensor, ...], position: Any) -> State:
        given = dict(zip(kept, tensors, strict=True))
        values = iter([_leaf(name, parts, given, lengths, position) for name, parts in named.items()])
        return map_leaves(lambda _: next(values), short)

    return Layout(tuple(kept), axes, assemble)


def _leaf(name: str, parts: Any, given: dict[str, Tensor], lengths: dict[str, int], position: Any) -> Any:
    short, long, _ = parts
    if name in given:
        return given[name]
    if isinstance(short, Tensor):
        return torch.zeros_like(short)
    if short == long:
        return short
    if (short, long) != (SHORT, LONG):
        raise ValueError(f"{name} in its state is {short} after {SHORT} tokens and {long} after {LONG}")
    beside = [key for key in lengths if key.rpartition(".")[0] == name.rpartition(".")[0]]
    return given[beside[0]].shape[lengths[beside[0]]] if beside else position


def _names(state: State, prefix: str = "") -> list[str]:
    if not isinstance(state, tuple):
        return [prefix.removeprefix(".")]
    fields = getattr(state, "_fields", range(len(state)))
    return [
        name for field, part in zip(fields, state, strict=True) for name in _names(part, f"{prefix}.{field}")
    ]

r"""States as trees of tensors, for tools that know nothing about mixers.

Beam search picks rows out of a state; an exporter wants its tensors one by one. Neither should know which
mixer made it. A state is nested tuples of tensors and whole numbers, so it can be walked; which axis of a
tensor is the batch is found by looking: it is the axis that differs between a batch of two and one of three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from postil.language_model import LanguageModel
from postil.mixer import State
from postil.sampling import evaluating

__all__ = ["batch_axes", "leaves", "map_leaves", "probe", "select_rows"]


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

r"""Decoding states in the place where `transformers` expects a cache of keys and values.

A batch of prompts of different lengths comes padded on the left. Postil's models need no padding: rows with
equally many tokens form a *group*, and every group is decoded as a batch of its own, from position 0, as it
would be alone. A batch without padding is one group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from postil.integrations.states import batch_axes, select_rows
from postil.language_model import LanguageModel, LanguageModelState

__all__ = ["Group", "PostilCache"]


class Group(NamedTuple):
    r"""Rows of a batch that have read equally many tokens, and their state."""

    rows: Tensor
    state: LanguageModelState | None


# The library's loop asks a cache how long it is and to follow the beams; it never looks inside. Unlike its
# own caches this one is a value: a longer cache is a new one, so one prefix can be continued twice.
class PostilCache:
    r"""The groups of a batch after `length` columns, padding counted."""

    is_compileable = False
    is_croppable = False

    def __init__(self, model: LanguageModel, length: int, groups: list[Group]):
        self.model = model
        self.length = length
        self.groups = groups

    @property
    def is_linear(self) -> list[bool]:
        r"""Say that the length of this cache can be asked for, as the library words it."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        r"""Give the number of columns read so far, padding counted."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        r"""Let row `i` go on from what row `beam_idx[i]` has read."""
        axes = batch_axes(self.model)
        groups = []
        for group in self.groups:
            matches = beam_idx.cpu()[:, None] == group.rows[None]
            rows, sources = matches.nonzero(as_tuple=True)
            if len(rows):
                state = None if group.state is None else select_rows(group.state, axes, sources)
                groups.append(Group(rows, state))
        self.groups = groups


def group_rows(lengths: Tensor) -> list[Group]:
    r"""Sort the rows of a new batch into groups of equal length."""
    lengths = lengths.cpu()
    return [Group((lengths == length).nonzero()[:, 0], None) for length in torch.unique(lengths).tolist()]

r"""Windows: which tokens an update reads.

A window is `seq_len` tokens and, one place further on, their targets. A text of $N$ tokens has $N - 1$
targets, and is covered by

$$W = \left\lceil \frac{N - 1}{T} \right\rceil$$

windows of length $T$: each starts where the one before ends, and the last is moved back so that it is whole
and ends with the last target. Texts of $T$, $T + 1$ and $T + 2$ tokens have none, one and two. An **epoch**
reads each window once, so it reads the text once.

Which windows an update reads is computed from the seed, the number of the update and the rank, and from
nothing else. There is no shuffled list and no cursor: a run that resumes at update $n$ needs only the number
$n$.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor

from postil.text.reading import TextError
from postil.text.token_files import Tokens

__all__ = [
    "Batches",
    "batch",
    "fixed_windows",
    "sequential_windows",
    "shuffled_windows",
    "window_count",
    "window_starts",
]

Ids = npt.NDArray[Any]
Inputs = Int64[Tensor, "B T"]


def window_count(n_tokens: int, seq_len: int) -> int:
    r"""Return $\lceil (N - 1) / T \rceil$, how many windows cover a text.

    Raises:
        TextError: the text is shorter than one window and its last target.
    """
    if seq_len < 1:
        raise TextError(f"seq_len={seq_len}: a window holds at least 1 token")
    if n_tokens <= seq_len:
        raise TextError(
            f"the text has {n_tokens} tokens, but a window of seq_len={seq_len} needs {seq_len + 1}, since "
            f"the last target lies one beyond: the smallest usable text has {seq_len + 1} tokens; take a "
            "longer text or a smaller seq_len"
        )
    return math.ceil((n_tokens - 1) / seq_len)


# If the cuts fell in the same places in every epoch, a token would be seen at one position only, always after
# the same past. So all windows of an epoch are shifted back by a common amount. The first and the last
# stay inside the text, and no two coincide, whatever the shift.
def window_starts(ids: Ids, n_tokens: int, seq_len: int, shift: Ids | int = 0) -> Ids:
    r"""Return where windows start: $\min(\max(iT - \mathrm{shift}, 0), N - 1 - T)$.

    With a shift, up to `shift` targets at the end of the text may be left out of the epoch.
    """
    return np.clip(ids * seq_len - shift, 0, n_tokens - 1 - seq_len)


# The stream of windows is one order of all windows after another. An update takes the next `world * batch` of
# it, its ranks one after the other; where an epoch ends inside an update, the next one fills it up.
def shuffled_windows(
    n_windows: int, batch: int, *, seed: int, update: int, rank: int = 0, world: int = 1
) -> Ids:
    r"""Return the windows `[batch]` that `update` reads on `rank`, in an order drawn anew for every epoch.

    The order depends on `batch * world`, not on either alone. Cost: `batch` numbers, whatever `n_windows`.

    Raises:
        TextError: a number is out of range.
    """
    epochs, places = _stream(n_windows, batch, update, rank, world)
    return _shuffle(epochs, places, n_windows, seed)


# Neighbouring windows in one batch would be all about the same page. So the rows start at equal distances,
# and row r reads its own stretch of the text from update to update.
def sequential_windows(n_windows: int, batch: int, *, update: int, rank: int = 0, world: int = 1) -> Ids:
    r"""Return the windows `[batch]` that `update` reads on `rank`, each row going on where it was.

    Rows continue across epochs where `batch * world` divides `n_windows`.

    Raises:
        TextError: a number is out of range.
    """
    _, places = _stream(n_windows, batch, update, rank, world)
    return _lanes(places, n_windows, batch * world)


@dataclass(frozen=True)
class Batches:
    r"""The batches of a run, by the number of the update: `inputs, targets = batches[update]`.

    `batch` counts the rows of one rank in one update.

    Raises:
        TextError: the text is too short, or a number is out of range.
    """

    tokens: Tokens
    seq_len: int
    batch: int
    seed: int = 0
    rank: int = 0
    world: int = 1
    shuffled: bool = True

    def __post_init__(self) -> None:
        _stream(window_count(len(self.tokens), self.seq_len), self.batch, 0, self.rank, self.world)
        _keys(self.seed, 0)

    @property
    def updates_per_epoch(self) -> int:
        r"""How many updates read the whole text once; the last may begin the next epoch."""
        return math.ceil(window_count(len(self.tokens), self.seq_len) / (self.batch * self.world))

    def starts(self, update: int) -> Ids:
        r"""Return where the rows of `update` start in the text, `[batch]`."""
        count = window_count(len(self.tokens), self.seq_len)
        epochs, places = _stream(count, self.batch, update, self.rank, self.world)
        if self.shuffled:
            ids = _shuffle(epochs, places, count, self.seed)
            shifts = {epoch: _keys(self.seed, epoch)[-1] % self.seq_len for epoch in set(epochs.tolist())}
            shift = np.array([shifts[epoch] for epoch in epochs.tolist()])
        else:
            ids, shift = _lanes(places, count, self.batch * self.world), 0
        return window_starts(ids, len(self.tokens), self.seq_len, shift)

    def __getitem__(self, update: int) -> tuple[Inputs, Inputs]:
        r"""Return inputs and targets of `update`, each `[batch, seq_len]`."""
        return batch(self.tokens, self.starts(update), self.seq_len)


def batch(tokens: Tokens, starts: Ids, seq_len: int) -> tuple[Inputs, Inputs]:
    r"""Read the rows that begin at `starts`, and their targets: the same rows one token further on.

    Raises:
        TextError: a row leaves the text, or the token file was changed.
    """
    rows = torch.from_numpy(tokens.rows(starts, seq_len + 1).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# Evaluation must not depend on training: no seed, no shift, every target exactly once. The rest that fills no
# window comes as a batch of its own, shorter; padding it would need a symbol that means nothing.
def fixed_windows(
    tokens: Tokens, seq_len: int, batch_size: int, *, rank: int = 0, world: int = 1
) -> Iterator[tuple[Inputs, Inputs]]:
    r"""Read a text in order, without overlap: batches `[batch_size, seq_len]`, fewer and shorter at the end.

    With `world` ranks, each reads every `world`-th batch; the last ranks may get one batch less. Weight
    each batch by its number of targets.

    Raises:
        TextError: the text has fewer than 2 tokens, so no target.
    """
    if len(tokens) < 2:
        raise TextError(f"the validation text has {len(tokens)} tokens, and needs 2: one and its target")
    whole, rest = divmod(len(tokens) - 1, seq_len)
    spans = [(first, min(batch_size, whole - first)) for first in range(0, whole, batch_size)]
    for first, count in spans[rank::world]:
        yield batch(tokens, np.arange(first, first + count) * seq_len, seq_len)
    if rest and len(spans) % world == rank:
        yield batch(tokens, np.array([whole * seq_len]), rest)


def _stream(n_windows: int, batch: int, update: int, rank: int, world: int) -> tuple[Ids, Ids]:
    if n_windows < 1 or batch < 1 or update < 0 or not 0 <= rank < world:
        raise TextError(
            f"n_windows={n_windows}, batch={batch}, update={update}, rank={rank}, world={world}: at least "
            "one window and one row, updates from 0, and ranks from 0 up to world"
        )
    first = (update * world + rank) * batch
    return np.divmod(np.arange(first, first + batch, dtype=np.int64), n_windows)


def _lanes(places: Ids, n_windows: int, rows: int) -> Ids:
    share, longer = divmod(n_windows, rows)
    row, step = places % rows, places // rows
    return row * share + np.minimum(row, longer) + step


def _keys(seed: int, epoch: int) -> list[int]:
    if seed < 0:
        raise TextError(f"seed={seed}: a seed is a whole number from 0 on")
    return np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS + 1, np.uint64).tolist()


# An array of all windows in random order would hold gigabytes for a text of terabytes, and would have to be
# drawn again at every resume. A Feistel network is a random order that can be asked for single places.
def _shuffle(epochs: Ids, places: Ids, n_windows: int, seed: int) -> Ids:
    ids = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = _permute(places[here], n_windows, _keys(seed, int(epoch))[:_ROUNDS])
    return ids


_ROUNDS = 8


# Each round adds a scrambled half to the other half, which can be undone, so distinct places stay distinct.
# The network permutes a power of four; a place that lands beyond the windows is sent through again until it
# lands among them, which keeps the order one-to-one and takes fewer than four trips on average.
def _permute(places: Ids, n_windows: int, keys: list[int]) -> Ids:
    half = np.uint64(max(1, math.ceil((n_windows - 1).bit_length() / 2)))
    mask = np.uint64((1 << int(half)) - 1)
    ids = places.astype(np.uint64)
    outside = np.ones(len(ids), bool)
    while outside.any():
        left, right = ids[outside] >> half, ids[outside] & mask
        for key in keys:
            left, right = right, left ^ (_scramble(right + np.uint64(key)) & mask)
        ids[outside] = (left << half) | right
        outside = ids >= n_windows
    return ids.astype(np.int64)


# Multiply-and-shift spreads every bit of a number over the whole of it; the constants are those of the
# SplitMix64 generator. Arithmetic is modulo 2^64 on purpose.
def _scramble(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

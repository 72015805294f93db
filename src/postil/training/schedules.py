r"""Learning rates as functions of the update.

A schedule that counts its own calls must be saved, restored, and never stepped once too often. One that is
a pure function of the update number $n = 1, 2, \dots$ needs none of this: a resumed run asks for the same
number and gets the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["SCHEDULES", "Schedule", "constant", "doubling_length", "noam", "warmup_cosine"]

Schedule = Callable[[int], float]
"""From the number of an update, counted from 1, to its learning rate."""


# Adam's second moment is a poor estimate during the first updates, and large early steps on it are what
# pre-norm and post-norm transformers alike do not forgive. So the rate rises linearly at first, and then
# falls with the inverse square root of the updates.
def noam(lr: float, warmup: int, d_model: int) -> Schedule:
    r"""Rise, then fall: $\mathrm{lr}\, D^{-1/2} \min(n^{-1/2},\; n\,\mathrm{warmup}^{-3/2})$.

    Source: [vaswani2017], Eq. 3.

    Raises:
        ValueError: `warmup` is below 1, where the formula divides by zero.
    """
    if warmup < 1:
        raise ValueError(f"warmup={warmup}: the noam schedule needs at least 1 update of warm-up")
    return lambda n: lr * d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)


def warmup_cosine(lr: float, warmup: int, updates: int, floor: float = 0.1) -> Schedule:
    r"""Rise linearly to `lr` in `warmup` updates, then fall along half a cosine to `floor * lr`.

    Raises:
        ValueError: the warm-up is negative or longer than the training.
    """
    if not 0 <= warmup <= updates:
        raise ValueError(f"warmup={warmup} must lie between 0 and the {updates} updates of the run")

    def rate(n: int) -> float:
        if n <= warmup:
            return lr * n / warmup
        progress = min(1.0, (n - warmup) / max(1, updates - warmup))
        return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    return rate


def constant(lr: float, warmup: int = 0) -> Schedule:
    r"""Rise linearly to `lr` for `warmup` updates and stay there."""
    return lambda n: lr * min(1.0, n / max(1, warmup))


# Most of what there is to learn at first is local, and short sequences teach it at a fraction of the cost.
# Doubling, not growing by ones: each new length costs a compiled model a compilation.
def doubling_length(start: int, full: int, over: int, n: int) -> int:
    r"""Give the length of sequences at update $n$: `start`, doubled in even steps until it is `full`.

    From update `over` + 1 on it is `full`. The idea is that of [fan2020]; the doubling is not.
    """
    doublings = math.ceil(math.log2(full / start))
    step = min(doublings, (n - 1) * doublings // over)
    return min(full, start << step)


SCHEDULES = ("noam", "cosine", "constant")
"""The names `postil train --optimizer.schedule` knows."""

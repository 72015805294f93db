r"""Sampling: from logits to text.

A language model gives a logit $z_v$ for every token $v$ of its vocabulary. Three rules shape them into the
distribution from which the next token is drawn. *Temperature* sharpens or flattens it,

$$p_v = \frac{e^{z_v / \tau}}{\sum_u e^{z_u / \tau}} \tag{1}$$

*top-k* keeps the $k$ most likely tokens, and *nucleus* sampling [holtzman2020] the smallest number $m$
of most likely tokens that together hold a mass of at least $p$:

$$m = \min \Bigl\{ n : \sum_{i \le n} p_{(i)} \ge p \Bigr\}, \qquad p_{(1)} \ge p_{(2)} \ge \dots \tag{2}$$

Each is a pure function here. Below them stands the loop that reads a prompt and writes on, a batch at a time.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

__all__ = ["DecodableModel", "Sampler", "distribution", "draw", "evaluating", "generate", "greedy", "stream"]


def greedy(logits: Float[Tensor, "... V"]) -> Int[Tensor, "..."]:
    r"""Give the most likely token, of several the one with the lowest id.

    Raises:
        ValueError: the logits have no finite maximum.
    """
    _finite_maximum(logits)
    return logits.argmax(dim=-1)


# Division by a temperature that underflows is no sharp distribution but $0/0$. Anything below the smallest
# normal float32 therefore counts as zero, where the limit of Eq. (1) is known: all mass on the maximum.
_COLDEST = torch.finfo(torch.float32).tiny


def distribution(
    logits: Float[Tensor, "... V"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Float[Tensor, "... V"]:
    r"""Shape logits into probabilities: temperature, then top-k, then nucleus, each on what the last left.

    The most likely token is always kept. Among equals, lower ids come first. `top_k` beyond the vocabulary
    keeps everything. Temperature 0 is greedy.

    Source: [holtzman2020], Eq. 2 and 3, for the nucleus.

    Cost: $O(V)$, or $O(V \log V)$ with top-k or top-p.

    Raises:
        ValueError: a number is out of range, or the logits have no finite maximum (one is NaN or infinite,
            or no token is possible).
    """
    check_shaping(temperature, top_k, top_p)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # The maximum comes off before the division: the largest exponent is then exactly 0 at any temperature.
    logits = logits - _finite_maximum(logits)
    if temperature < _COLDEST:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if top_k is None and (top_p is None or top_p == 1.0):
        return probabilities
    return _keep_most_likely(logits, probabilities, top_k, top_p)


# The order is that of the logits: two that differ in a last bit may round to one probability, and top-p 0
# would then keep another token than the greedy one.
def _keep_most_likely(
    logits: Tensor, probabilities: Tensor, top_k: int | None, top_p: float | None
) -> Tensor:
    ids = logits.argsort(dim=-1, descending=True, stable=True)
    ordered = probabilities.gather(-1, ids)
    if top_k is not None:
        ordered[..., top_k:] = 0.0
        ordered /= ordered.sum(dim=-1, keepdim=True)
    # A token stays if the mass *before* it has not reached $p$. To ask for the mass up to and including it
    # would drop the very token that crosses the threshold, which Eq. (2) keeps.
    if top_p is not None and top_p < 1.0:
        before = ordered.cumsum(dim=-1) - ordered
        before[..., 0] = -1.0
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        ordered /= ordered.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, ids, ordered)


# One uniform number decides, by where it falls among the cumulative sums. A row's token then depends on the
# row's own number and on nothing else in the batch. The sums are taken on the CPU in float64: in another
# order or precision the same seed would write another text on another device.
def draw(probabilities: Float[Tensor, "B V"], uniform: Float[Tensor, "B"]) -> Int[Tensor, "B"]:
    r"""Draw a token a row by inverting the cumulative sums at `uniform`, numbers in $[0, 1)$.

    A token of probability 0 is never drawn. The result is on the CPU.
    """
    sums = probabilities.cpu().double().cumsum(dim=-1)
    thresholds = uniform.cpu().double()[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, thresholds, right=True)[:, 0]


@dataclass(frozen=True)
class Sampler:
    r"""How to draw: the three numbers of `distribution`, checked.

    Raises:
        ValueError: naming the number that is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_shaping(self.temperature, self.top_k, self.top_p)

    def distribution(self, logits: Float[Tensor, "... V"]) -> Float[Tensor, "... V"]:
        r"""Shape logits into probabilities."""
        return distribution(logits, self.temperature, self.top_k, self.top_p)


def check_shaping(temperature: float, top_k: int | None, top_p: float | None) -> None:
    r"""Check the three numbers.

    Raises:
        ValueError: naming the number and its range.
    """
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: expected a finite number of at least 0 (0 is greedy)")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: expected at least 1, or None to keep every token")
    if top_p is not None and not 0.0 <= top_p <= 1.0:
        raise ValueError(f"top_p={top_p}: expected a mass between 0 and 1, or None to keep every token")


# The maximum of a row with a NaN in it is NaN, so one look at the maxima finds every kind of damage.
def _finite_maximum(logits: Tensor) -> Tensor:
    maximum = logits.amax(dim=-1, keepdim=True)
    if not torch.isfinite(maximum).all():
        found = maximum[~torch.isfinite(maximum)][0].item()
        raise ValueError(f"the logits have maximum {found}; a finite one is needed to choose a token")
    return maximum


@runtime_checkable
class DecodableModel(Protocol):
    r"""What the loop asks of a model: to read a chunk, and to read one token, with a state in between."""

    max_len: int | None
    """The most tokens it can read in one text; `None`: any number."""

    def prefill(self, ids: Int[Tensor, "B T"], state: Any = None) -> tuple[Float[Tensor, "B T V"], Any]:
        r"""Read a chunk after what `state` remembers."""
        ...

    def step(self, ids: Int[Tensor, "B"], state: Any = None) -> tuple[Float[Tensor, "B V"], Any]:
        r"""Read one token."""
        ...


# Only the modules that were training go back to it: a part that its owner froze in eval mode stays there.
@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    r"""Compute without dropout and without gradients, and leave `model` as it was found."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def stream(
    model: DecodableModel,
    prompts: Sequence[Sequence[int] | Tensor],
    *,
    tokens: int,
    sampler: Sampler = Sampler(),
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, int]]:
    r"""Continue each prompt, giving `(row, id)` as each token is drawn.

    A row ends after `tokens` tokens, or with `stop`, which is given out too. Row `b` draws from its own
    random numbers, of seed `seed + b`: whatever the other rows are, it writes what it would write alone.
    The global random numbers are not touched, and nothing is kept on the model.

    When a text outgrows `model.max_len`, with one warning, its last `max_len` tokens are read at first;
    each time the positions are used up again, as many of the last tokens as half the positions hold (rounded
    up) are read anew from position 0.

    Cost: one step of the model a token. Reading anew costs one token more for each token written.

    Raises:
        ValueError: a prompt is empty, or `tokens` is negative.
    """
    rows = [[int(token) for token in prompt] for prompt in prompts]
    if tokens < 0:
        raise ValueError(f"tokens={tokens}: expected at least 0")
    for number, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {number} is empty; give at least one token to start from")
    _warn_of_length(max(map(len, rows), default=0), tokens, model.max_len)
    if model.max_len is not None:
        rows = [row[-model.max_len :] for row in rows]
    return _write(model, rows, tokens, sampler, seed, stop) if rows and tokens else iter(())


# All rows share one clock, the position that is read next. Nothing is padded: as long as the clock stands
# inside a row's prompt, the prompt says the row's next token, afterwards the row draws it. Every row thus
# starts at position 0, as it would alone.
def _write(
    model: Any, prompts: list[list[int]], tokens: int, sampler: Sampler, seed: int, stop: int | None
) -> Iterator[tuple[int, int]]:
    generators = [torch.Generator().manual_seed(seed + row) for row in range(len(prompts))]
    left = [tokens] * len(prompts)
    # One column a position; `zip` ends with the shortest prompt, so these are the columns all prompts fill.
    text: deque[tuple[int, ...]] = deque(zip(*prompts, strict=False), maxlen=model.max_len)
    clock, position, unread, state = len(text), 0, list(text), None
    while True:
        logits, state = _read(model, unread, state)
        position += len(unread)
        drawing = [row for row, prompt in enumerate(prompts) if clock >= len(prompt) and left[row]]
        drawn = _draw_rows(logits, drawing, generators, sampler)
        for row, token in drawn.items():
            left[row] = 0 if token == stop else left[row] - 1
            yield row, token
        if not any(left):
            return
        # A row that has ended reads its last token over and over; what it says to that is not asked.
        last = text[-1]
        text.append(
            tuple(
                prompt[clock] if clock < len(prompt) else drawn.get(row, last[row])
                for row, prompt in enumerate(prompts)
            )
        )
        clock, unread = clock + 1, [text[-1]]
        if position == model.max_len:
            position, unread, state = 0, list(text)[-((model.max_len + 1) // 2) :], None


def _read(model: Any, columns: list[tuple[int, ...]], state: Any) -> tuple[Tensor, Any]:
    ids = torch.tensor(columns, device=next(model.parameters()).device)
    with evaluating(model):
        if state is not None:
            return model.step(ids[0], state)
        logits, state = model.prefill(ids.T)
        return logits[:, -1], state


def _draw_rows(
    logits: Tensor, rows: list[int], generators: list[torch.Generator], sampler: Sampler
) -> dict[int, int]:
    if not rows:
        return {}
    uniform = torch.stack([torch.rand((), generator=generators[row], dtype=torch.float64) for row in rows])
    ids = draw(sampler.distribution(logits[rows]), uniform)
    return dict(zip(rows, ids.tolist(), strict=True))


def _warn_of_length(longest: int, tokens: int, max_len: int | None) -> None:
    if max_len is not None and longest + tokens - 1 > max_len:
        warnings.warn(
            f"a prompt of {longest} tokens and {tokens} to write exceed the model's {max_len} positions: "
            f"it reads the last {max_len}, and whenever all are used, the last {(max_len + 1) // 2} anew",
            stacklevel=3,
        )


# Most callers want a table, not a stream.
def generate(
    model: DecodableModel,
    prompts: Sequence[Sequence[int] | Tensor],
    *,
    tokens: int,
    sampler: Sampler = Sampler(),
    seed: int = 0,
    stop: int | None = None,
) -> Int[Tensor, "B N"]:
    r"""Continue each prompt; give the new tokens of `stream`, one row a prompt.

    Rows that ended early are filled up with `stop`; `N` is the length of the longest, at most `tokens`.

    Raises:
        ValueError: as `stream` does.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    for row, token in stream(model, prompts, tokens=tokens, sampler=sampler, seed=seed, stop=stop):
        texts[row].append(token)
    longest = max(map(len, texts), default=0)
    rows = [text + [stop] * (longest - len(text)) for text in texts]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), longest)

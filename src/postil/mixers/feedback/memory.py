r"""The memory: a list that grows by one row a step, without being copied.

At step $t$ attention reads rows $0, \dots, t-1$ as one tensor. Stacking them anew at every step would copy
$1 + 2 + \dots + T$ rows, and keep all the copies for the backward pass. A buffer with room to spare lets each
step write its row behind the others, and read a view of the first rows.

What is the gradient of a row? Row $j$ is read by every later step, so

$$\frac{\partial \mathcal L}{\partial m_j} = \sum_{t > j} G^{(t)}_j, \qquad
G^{(t)} = \text{the gradient of the view that step } t \text{ has read} \tag{1}$$

It is tempting to sum these in one shared buffer beside the memory, and to return row $j$ of it when step
$j$'s turn comes. But a sum that belongs to the buffer outlives the backward pass it belongs to: a second
forward, a second backward, or a step whose output nobody used leaves it wrong, silently.

Here the chain itself carries the sum. The stack of $n$ rows is a *function of the stack of $n-1$ rows* and
the new row:

$$M_n = [\,M_{n-1};\ m_n\,], \qquad
\frac{\partial \mathcal L}{\partial M_{n-1}} \mathrel{+}= G_{<n}, \quad
\frac{\partial \mathcal L}{\partial m_n} = G_n \tag{2}$$

This is concatenation, whose derivative holds for any use; only its *forward* is done without a copy.

:paper: fan2020
:terms:
    M_n: buffer
    M_{n-1}: stack, below
    m_n: row
    G: grads
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional as F

__all__ = ["FeedbackState", "Stack", "StackFunction"]


class StackFunction(torch.autograd.Function):
    r"""Append a row to a stack, Eq. (2): `(stack [n, ...], row, buffer) -> stack [n+1, ...]`.

    `buffer` already holds both; the result is a view of it. No step's tensors are written again, so the
    views that earlier steps saved stay what they were.
    """

    @staticmethod
    def forward(stack: Tensor, row: Tensor, buffer: Tensor) -> Tensor:
        r"""Give the first `n+1` rows of the buffer."""
        # A new tensor object over the same storage: returning a view of an argument would make autograd
        # track writes to the buffer, which only ever touch rows that no view contains.
        return buffer.data[: stack.shape[0] + 1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        r"""Remember nothing: the derivative is the same everywhere."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        r"""Split the gradient between the shorter stack and the row; views, no copies."""
        return grads[0][:-1], grads[0][-1], None


class Stack:
    r"""A growing stack of rows for one forward pass.

    `max_len` is the room made at first; the buffer doubles when it is full. `append(n, row)` writes row `n`,
    `get()` gives rows `0` to `n` as one differentiable tensor, `free()` lets go of them. Appending to an
    earlier position starts a branch of its own: what was read before stays intact.

    Cost: to append copies the one new row; when the buffer is full, all rows once, so that $n$ rows cost
    fewer than $3 n$ copies of a row. Backward adds up one gradient of the whole stack a step.

    Raises:
        ValueError: rows are skipped, or differ in shape.
    """

    def __init__(self, max_len: int = 512):
        if max_len < 1:
            raise ValueError(f"max_len={max_len}: the stack needs room for at least one row")
        self.max_len = max_len
        self.free()

    def free(self) -> None:
        r"""Let go of all rows; tensors already read keep theirs."""
        self._buffer: Tensor | None = None
        self._stacks: list[Tensor] = []

    def append(self, n: int, value: Shaped[Tensor, "*row"]) -> None:
        r"""Put `value` at position `n`, on top of the rows before it."""
        if n > len(self._stacks):
            raise ValueError(
                f"row {n} is appended to a stack of {len(self._stacks)} rows; rows come one by one"
            )
        if n == 0:
            self._buffer = None
        elif value.shape != self._stacks[0].shape[1:]:
            raise ValueError(
                f"row {n} has shape {list(value.shape)}, the rows below {list(self._stacks[0].shape[1:])}"
            )
        branches = n < len(self._stacks)
        self._stacks = self._stacks[:n]
        below = self._stacks[-1] if n else value.new_empty(0, *value.shape)
        if self._buffer is None or branches or n == self._buffer.shape[0]:
            self._buffer = self._moved(below, value)
        self._buffer.data[n] = value.detach()
        self._stacks.append(StackFunction.apply(below, value, self._buffer))

    def get(self) -> Shaped[Tensor, "n *row"]:
        r"""Give all rows as one tensor.

        Raises:
            ValueError: the stack is empty.
        """
        if not self._stacks:
            raise ValueError("the stack is empty: append a row before reading it")
        return self._stacks[-1]

    # Views of the old buffer keep it alive for as long as somebody needs them, and no longer.
    def _moved(self, below: Tensor, value: Tensor) -> Tensor:
        room = max(self.max_len, 2 * below.shape[0])
        buffer = value.detach().new_zeros(room, *value.shape)
        buffer[: below.shape[0]] = below.detach()
        return buffer


# ## The state of decoding
#
# Between calls the memory is a value: keys and values of the positions so far, and which of them are real.
# The same trick keeps it cheap. A state that is the newest owner of its buffer may write behind its last row,
# where no older state looks; any other takes a copy first.
_claims = threading.Lock()


class FeedbackState(NamedTuple):
    r"""Keys and values of the memory; rows `start` to `stop` of the buffers are alive.

    `G` is 1 where all layers share keys and values, and the number of layers where each has its own. `real`
    says which memories are not padding; `None` means all. With a window the buffers hold at most twice the
    window, however long the text becomes.
    """

    keys: Float[Tensor, "C B G H E"]
    values: Float[Tensor, "C B G H E"]
    real: Bool[Tensor, "C B"] | None
    start: int
    stop: int
    written: Tensor

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor | None]:
        r"""The living rows: keys, values, and which of them are real."""
        live = slice(self.start, self.stop)
        return self.keys[live], self.values[live], None if self.real is None else self.real[live]

    @staticmethod
    def of(keys: Tensor, values: Tensor, real: Tensor | None, window: int | None = None) -> FeedbackState:
        r"""Make a state of these rows, as far as a window reaches back; gradients flow through it."""
        if window is not None and keys.shape[0] > window:
            # A slice would keep what it was cut from alive.
            keys, values = keys[-window:].clone(), values[-window:].clone()
            real = None if real is None else real[-window:].clone()
        return FeedbackState(keys, values, real, 0, keys.shape[0], torch.tensor(keys.shape[0]))

    def detached(self) -> FeedbackState:
        r"""Cut the state off the graph: a following segment reads it, but sends no gradient back."""
        return self._replace(keys=self.keys.detach(), values=self.values.detach())

    def append(self, key: Tensor, value: Tensor, window: int | None) -> FeedbackState:
        r"""Add one row of keys and values `[B, G, H, E]`, forgetting what the window no longer reaches.

        Cost: one row; every so often, and when the state has been continued before, a copy of all.
        """
        if torch.compiler.is_compiling() or (
            torch.is_grad_enabled() and (key.requires_grad or self.keys.requires_grad)
        ):
            keys, values, real = self.memory
            if real is not None:
                real = torch.cat([real, torch.ones_like(real[:1])])
            return FeedbackState.of(
                torch.cat([keys, key[None]]), torch.cat([values, value[None]]), real, window
            )
        grown = self.grown(window)
        grown.keys[grown.stop - 1], grown.values[grown.stop - 1] = key, value
        return grown

    def grown(self, window: int | None) -> FeedbackState:
        r"""Give the state one row later; the row, the last one, belongs to the caller and is his to write."""
        state = self if self._claim() else self._moved(window)
        if state.real is not None:
            state.real[state.stop] = True
        stop = state.stop + 1
        start = state.start if window is None else max(state.start, stop - window)
        return state._replace(start=start, stop=stop)

    # Two threads may continue one state at the same moment; only one of them gets the row behind it.
    def _claim(self) -> bool:
        outlived = self.keys.is_inference() and not torch.is_inference_mode_enabled()
        with _claims:
            free = int(self.written) == self.stop < self.keys.shape[0] and not outlived
            if free:
                self.written.fill_(self.stop + 1)
        return free

    def _moved(self, window: int | None) -> FeedbackState:
        count = self.stop - self.start
        room = 2 * max(count, 32) if window is None else 2 * max(count, window)

        # In memory the positions of one head lie together, as attention reads them, and heads and rows of the
        # batch can be taken as one axis.
        def moved(rows: Tensor) -> Tensor:
            batch, groups, heads, width = rows.shape[1:]
            buffer = rows.new_zeros(groups, heads, batch, room, width).permute(3, 2, 0, 1, 4)
            buffer[:count] = rows
            return buffer

        keys, values, real = self.memory
        seen = None if real is None else F.pad(real, (0, 0, 0, room - count))
        return FeedbackState(moved(keys), moved(values), seen, 0, count, torch.tensor(count + 1))

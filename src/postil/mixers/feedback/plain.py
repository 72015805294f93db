r"""The whole sequence, in plain PyTorch.

PyTorch offers no operation for a recurrence of layers, so the steps are written out: about ten calls for
each of $T \times L$ layer steps. The matrix products in them have only $B$ rows and are what the time goes
into; everything that can be kept away from the loop has been, by folding.

What backward will need goes straight into large tensors, one for the whole sequence: a list of small ones
would have to be put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from postil.mixers.feedback.recurrence import FoldedWeights

__all__ = [
    "CHUNK",
    "EPS",
    "Problem",
    "Tape",
    "blank_tape",
    "forward",
    "gate",
    "probabilities",
    "room",
    "rows",
]

CHUNK = 16
EPS = 1e-5


class Problem(NamedTuple):
    r"""What the recurrence is computed of. Memory is `[G, H, B, S, E]`; `noise` is empty without dropout.

    `keep` says whether forward keeps the probabilities for backward, which computes them again otherwise.
    """

    x: Tensor
    keys: Tensor
    values: Tensor
    allowed: Tensor | None
    noise: list[Tensor]
    weights: FoldedWeights
    window: int
    norm_memory: bool
    keep: bool = True

    @property
    def carried(self) -> int:
        r"""Number of memories from earlier segments."""
        return self.keys.shape[3]

    def past(self, t: int) -> slice:
        r"""The memories that step `t` may read."""
        now = self.carried + t
        return slice(max(0, now - self.window), now)


# Normalised rows are not kept. They come back from the layer inputs, a chunk at a time, in one operation;
# that is cheaper than writing them at every step.
class Tape(NamedTuple):
    r"""What forward leaves for backward."""

    inputs: Tensor
    middles: Tensor
    hidden: Tensor
    attended: Tensor
    queries: Tensor
    probabilities: Tensor
    mixed: Tensor
    mixed_rstd: Tensor


def forward(p: Problem) -> tuple[Tensor, Tensor, Tensor, Tape]:
    r"""Compute all positions; give the outputs, all keys and values `[G, H, B, S, E]`, and the tape.

    Cost: $L(12 D^2 + S D)$ multiplications a position; memory $T B L (4 D + d_{ff} + H S)$, without the
    last term if probabilities are not kept.
    """
    (length, batch, width), layers = p.x.shape, p.weights.query.shape[0]
    keys, values = room(p.keys, length), room(p.values, length)
    tape = _start_tape(p)
    outputs = torch.empty_like(p.x)
    mixing = p.weights.mixing.tolist()
    key_value = p.weights.key_value.flatten(0, 1).t()
    for t in range(length):
        h = p.x[t]
        memory = h * mixing[0]
        for layer in range(layers):
            tape.inputs[layer, t] = h
            if p.past(t).stop > 0:
                h = _attend(p, tape, keys, values, h, t, layer)
            tape.middles[layer, t] = h
            h = _feed_forward(p, tape, h, t, layer)
            memory.add_(h, alpha=mixing[layer + 1])
        outputs[t] = h
        if p.norm_memory:
            memory, _, tape.mixed_rstd[t] = torch.native_layer_norm(memory, [width], None, None, EPS)
        tape.mixed[t] = memory
        kv = torch.addmm(p.weights.key_value_bias.flatten(), memory, key_value)
        k, v = kv.view(batch, keys.shape[0], 2, keys.shape[1], -1).permute(2, 1, 3, 0, 4)
        keys[:, :, :, p.carried + t], values[:, :, :, p.carried + t] = k, v
    return outputs, keys, values, tape


def room(carried: Tensor, length: int) -> Tensor:
    r"""Copy the carried memory into a buffer that has room for the new ones."""
    groups, heads, batch, count, width = carried.shape
    buffer = carried.new_empty(groups, heads, batch, count + length, width)
    buffer[:, :, :, :count] = carried
    return buffer


def blank_tape(p: Problem, new: Callable[..., Tensor], columns: int | None = None) -> Tape:
    r"""Make room for what forward leaves, by `new`; a row of probabilities has one for each memory."""
    columns = p.carried + p.x.shape[0] if columns is None else columns
    (length, batch, width), (layers, hidden) = p.x.shape, p.weights.layer1.shape[:2]
    heads = p.keys.shape[1]
    return Tape(
        inputs=new(layers, length, batch, width),
        middles=new(layers, length, batch, width),
        hidden=new(layers, length, batch, hidden),
        attended=new(layers, length, batch, width),
        queries=new(heads * batch, length, layers, width // heads),
        probabilities=new(heads * batch, length, layers, columns) if p.keep else new(0),
        mixed=new(length, batch, width),
        mixed_rstd=new(length, batch, 1) if p.norm_memory else new(0),
    )


# A first step that reads nothing has no query and no answer, but its place in later products must hold
# numbers, and zeros are the right ones. So it is with what lies beyond a window.
def _start_tape(p: Problem) -> Tape:
    tape = blank_tape(p, p.x.new_empty)
    tape.attended[:, :1], tape.queries[:, :1] = 0.0, 0.0
    if p.keep and p.window < p.carried + len(p.x):
        tape.probabilities.zero_()
    elif p.keep:
        tape.probabilities[:, :1] = 0.0
    return tape


# All heads share one layout, `[H, B, ...]`: the positions' product runs once a head with the batch as rows,
# the keys' product once a head and row, and both write into the same scores.
def probabilities(p: Problem, keys: Tensor, queries: Tensor, t: int, layer: int) -> Tensor:
    r"""Compute what step `t` pays attention to, `[H B, past]`, from its queries `[H B, E]`."""
    w, past = p.weights, p.past(t)
    heads, count = keys.shape[1], past.stop - past.start
    scores = torch.baddbmm(
        w.position_bias[layer, :, None, -count:],
        queries.unflatten(0, (heads, -1)),
        w.positions[layer, :, -count:].transpose(1, 2),
    )
    scores.view(-1, 1, count).baddbmm_(queries[:, None], rows(keys, layer)[:, past].transpose(1, 2))
    hidden = _hidden(p, t, past)
    if hidden is not None:
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    return (weights if hidden is None else weights.masked_fill_(hidden, 0.0)).view(-1, count)


def _attend(p: Problem, tape: Tape, keys: Tensor, values: Tensor, h: Tensor, t: int, layer: int) -> Tensor:
    w, past = p.weights, p.past(t)
    (batch, width), heads = h.shape, keys.shape[1]
    n = torch.native_layer_norm(h, [width], None, None, EPS)[0]
    q = torch.addmm(w.query_bias[layer], n, w.query[layer].t()).view(batch, heads, -1).transpose(0, 1)
    queries = tape.queries[:, t, layer]
    queries.view(heads, batch, -1).copy_(q)
    weights = probabilities(p, keys, queries, t, layer)
    if p.keep:
        tape.probabilities[:, t, layer, past] = weights
    if p.noise:
        weights = weights * p.noise[0][layer, t, :, :, past].flatten(0, 1)
    answer = torch.bmm(weights[:, None], rows(values, layer)[:, past]).view(heads, batch, -1).transpose(0, 1)
    attended = tape.attended[layer, t]
    attended.view(batch, heads, -1).copy_(answer)
    through = gate(p, t, layer)
    if through is None:
        return torch.addmm(h, attended, w.output[layer].t()).add_(w.output_bias[layer])
    return torch.addmm(w.output_bias[layer], attended, w.output[layer].t()).mul_(through).add_(h)


def rows(memory: Tensor, layer: int) -> Tensor:
    r"""Give a layer's keys or values, heads and batch as one axis."""
    return memory[layer % memory.shape[0]].flatten(0, 1)


def _hidden(p: Problem, t: int, past: slice) -> Tensor | None:
    return None if p.allowed is None else ~p.allowed[min(t, p.allowed.shape[0] - 1), past].t()


# Attention is skipped where nothing may be read. The answer there is zero already; the output bias is not.
def gate(p: Problem, t: int, layer: int) -> Tensor | None:
    r"""Give what attention's answer is multiplied with; `None` stands for one."""
    hidden = _hidden(p, t, p.past(t))
    noise = p.noise[1][layer, t] if p.noise else None
    if hidden is None:
        return noise
    reads = (~hidden).any(dim=1, keepdim=True).to(p.x.dtype)
    return reads if noise is None else noise * reads


def _feed_forward(p: Problem, tape: Tape, h: Tensor, t: int, layer: int) -> Tensor:
    w, f = p.weights, tape.hidden[layer, t]
    n = torch.native_layer_norm(h, [h.shape[1]], None, None, EPS)[0]
    torch.addmm(w.layer1_bias[layer], n, w.layer1[layer].t(), out=f).relu_()
    if not p.noise:
        return torch.addmm(h, f, w.layer2[layer].t()).add_(w.layer2_bias[layer])
    f.mul_(p.noise[2][layer, t])
    return torch.addmm(w.layer2_bias[layer], f, w.layer2[layer].t()).mul_(p.noise[3][layer, t]).add_(h)

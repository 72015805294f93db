r"""The whole sequence, in plain PyTorch.

PyTorch offers no operation for a recurrence of layers, so the steps are written out: about ten calls for
each of $T \times L$ layer steps. The matrix products in them have only $B$ rows and are what the time goes
into; everything that can be kept away from the loop has been, by folding.

What backward will need goes straight into large tensors, one for the whole sequence: a list of small ones
would have to be put together again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from postil.mixers.feedback.recurrence import FoldedWeights

__all__ = ["CHUNK", "EPS", "Problem", "Tape", "blank_tape", "forward", "gate", "room", "rows", "score_table"]

CHUNK = 16
EPS = 1e-5


class Problem(NamedTuple):
    r"""What the recurrence is computed of. Memory is `[G, H, B, S, E]`; `noise` is empty without dropout."""

    x: Tensor
    keys: Tensor
    values: Tensor
    allowed: Tensor | None
    noise: list[Tensor]
    weights: FoldedWeights
    window: int
    norm_memory: bool

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
    r"""What forward leaves for backward. Probabilities have `CHUNK` columns of zeros on their left."""

    inputs: Tensor
    middles: Tensor
    hidden: Tensor
    attended: Tensor
    queries: Tensor
    probabilities: Tensor
    dropped: Tensor
    mixed: Tensor
    mixed_rstd: Tensor


def forward(p: Problem) -> tuple[Tensor, Tensor, Tensor, Tape]:
    r"""Compute all positions; give the outputs, all keys and values `[G, H, B, S, E]`, and the tape.

    Cost: $L(12 D^2 + S D)$ multiplications a position; memory $T B L (4 D + d_{ff} + H S)$.
    """
    (length, batch, width), layers = p.x.shape, p.weights.query.shape[0]
    keys, values = room(p.keys, length), room(p.values, length)
    tape = blank_tape(p)
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


def blank_tape(p: Problem) -> Tape:
    r"""Make room for what forward leaves."""
    (length, batch, width), (layers, hidden) = p.x.shape, p.weights.layer1.shape[:2]
    heads = p.keys.shape[1]

    def new(*size: int) -> Tensor:
        return p.x.new_empty(size)

    attended, queries = new(layers, length, batch, width), new(heads * batch, length, layers, width // heads)
    # A first step that reads nothing has no query and no answer, but its place in the products must hold
    # numbers, and zeros are the right ones.
    attended[:, :1], queries[:, :1] = 0.0, 0.0
    return Tape(
        inputs=new(layers, length, batch, width),
        middles=new(layers, length, batch, width),
        hidden=new(layers, length, batch, hidden),
        attended=attended,
        queries=queries,
        probabilities=score_table(p),
        dropped=score_table(p) if p.noise else new(0),
        mixed=new(length, batch, width),
        mixed_rstd=new(length, batch, 1) if p.norm_memory else new(0),
    )


# Columns right of the present are never looked at. Under a window the distant past is, by products that do
# not know of it, and has to be zero.
def score_table(p: Problem) -> Tensor:
    r"""Make a table of all scores of all layers."""
    length, batch, heads, layers = p.x.shape[0], p.x.shape[1], p.keys.shape[1], p.weights.query.shape[0]
    table = p.x.new_empty(heads * batch, length, layers, CHUNK + p.carried + length)
    table[..., :CHUNK] = 0.0
    table[:, :1] = 0.0
    return table.zero_() if p.window < p.carried + length else table


# All heads share one layout, `[H, B, ...]`: the positions' product runs once a head with the batch as rows,
# the keys' product once a head and row, and both write into the same scores.
def _attend(p: Problem, tape: Tape, keys: Tensor, values: Tensor, h: Tensor, t: int, layer: int) -> Tensor:
    w, past = p.weights, p.past(t)
    (batch, width), heads, count = h.shape, keys.shape[1], past.stop - past.start
    columns = slice(CHUNK + past.start, CHUNK + past.stop)
    k, v = (rows(m, layer)[:, past] for m in (keys, values))
    n = torch.native_layer_norm(h, [width], None, None, EPS)[0]
    q = torch.addmm(w.query_bias[layer], n, w.query[layer].t()).view(batch, heads, -1).transpose(0, 1)
    queries = tape.queries[:, t, layer]
    queries.view(heads, batch, -1).copy_(q)
    scores = torch.baddbmm(
        w.position_bias[layer, :, None, -count:], q, w.positions[layer, :, -count:].transpose(1, 2)
    )
    scores.view(-1, 1, count).baddbmm_(queries[:, None], k.transpose(1, 2))
    hidden = _hidden(p, t, past)
    if hidden is not None:
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    probabilities = scores.softmax(-1)
    if hidden is not None:
        probabilities.masked_fill_(hidden, 0.0)
    tape.probabilities[:, t, layer, columns] = probabilities.view(-1, count)
    if p.noise:
        probabilities = probabilities * p.noise[0][layer, t, :, :, past]
        tape.dropped[:, t, layer, columns] = probabilities.view(-1, count)
    answer = torch.bmm(probabilities.view(-1, 1, count), v).view(heads, batch, -1).transpose(0, 1)
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

r"""Backward of the whole sequence, by hand, in plain PyTorch.

Automatic differentiation would record about twenty operations for each of $T \times L$ layer steps, and for
each product with a weight it would add a whole matrix to that weight's gradient: $T$ passes over all
parameters. Little of this has to happen step by step. Going backwards, let $\delta$ stand for "gradient of
the loss by". Sequential are only

* the chain of layers,
  $\delta h \to \delta f \to \delta z \to \delta A \to \delta P \to \delta q \to \delta h$;
* the memory: $\delta K_t, \delta V_t$ must be complete before step $t$ begins, as $\delta m_t$ follows from
  them and enters every layer of step $t$.

All weight gradients can wait. They are sums of outer products over rows, and rows of 16 steps make one
matrix product of a decent size:

$$\delta W = \sum_t \delta y_t\, n_t^\top = \delta Y^\top N \tag{1}$$

What is owed to the memories can be paid in bulk, too. A chunk of 16 steps pays all memories before it with
one product for all its steps and layers; only to memories of the chunk itself each step pays at once:

$$\delta K_j = \sum_{t > j,\, layer} \delta S^l_{t,j}\; q^l_t, \qquad
\delta V_j = \sum_{t > j,\, layer} P^l_{t,j}\; \delta A^l_t \tag{2}$$
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from postil.mixers.feedback.plain import CHUNK, EPS, Problem, Tape, gate, probabilities, rows
from postil.mixers.feedback.recurrence import FoldedWeights

__all__ = ["Debts", "backward", "memory_weights", "start_debts"]


class Debts(NamedTuple):
    r"""Gradients that grow while backward runs: of the memory, and of what the memory was made of."""

    keys: Tensor
    values: Tensor
    mixed: Tensor
    key_value: Tensor


def backward(
    p: Problem,
    tape: Tape,
    outputs: Tensor,
    memory: tuple[Tensor, Tensor],
    grad: Tensor,
    grad_memory: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, FoldedWeights]:
    r"""Give the gradients of `x`, of the carried keys and values, and of the weights.

    `outputs` and `memory` are what forward gave, `grad` and `grad_memory` their gradients.

    Cost: twice the multiplications of forward; memory $16 B L H S$ beside the tape.
    """
    debts, dw, dx = start_debts(p, tape, grad_memory)
    tables = _tables(p)
    for stop in range(len(p.x), 0, -CHUNK):
        start = max(0, stop - CHUNK)
        _chunk_backward(p, tape, memory, debts, tables, grad, dx, dw, start, stop)
    memory_weights(tape, outputs, debts, dw)
    return dx, debts.keys[:, :, :, : p.carried], debts.values[:, :, :, : p.carried], dw


def start_debts(
    p: Problem, tape: Tape, grad_memory: tuple[Tensor, Tensor]
) -> tuple[Debts, FoldedWeights, Tensor]:
    r"""Make room for all gradients; the memory's begin with what its later readers sent."""
    length, batch = p.x.shape[:2]
    groups, heads = p.keys.shape[:2]
    debts = Debts(
        keys=grad_memory[0].clone(memory_format=torch.contiguous_format),
        values=grad_memory[1].clone(memory_format=torch.contiguous_format),
        mixed=torch.empty_like(tape.mixed),
        key_value=p.x.new_empty(length, batch, groups, 2, heads, p.keys.shape[-1]),
    )
    dw = FoldedWeights(*(torch.zeros_like(w, memory_format=torch.contiguous_format) for w in p.weights))
    dx = torch.empty_like(p.x)
    return debts, dw, dx


# A chunk's share of equation (2): its own $\delta S$, $P$ and $\delta A$, used again by the next chunk. The
# scores have columns of zeros on their left.
class Tables(NamedTuple):
    r"""Scores `[H B, 16, L, 16 + S]`, probabilities `[H B, 16, L, S]` and answers `[H B, 16, L, E]`."""

    scores: Tensor
    probabilities: Tensor
    answers: Tensor


def _tables(p: Problem) -> Tables:
    steps, layers, span = min(CHUNK, len(p.x)), p.weights.query.shape[0], p.carried + len(p.x)
    heads = p.keys.shape[1] * p.keys.shape[2]
    # Columns after the present are never read. Products that do not know of a window also read the columns
    # before it. Those are zero from the start, and the walk towards the past has not come to them yet.
    return Tables(
        p.x.new_zeros(heads, steps, layers, CHUNK + span),
        p.x.new_zeros(heads, steps, layers, span),
        p.x.new_zeros(heads, steps, layers, p.keys.shape[-1]),
    )


# Steps and layers are one axis of the product where all layers share the memory.
def _pay(
    p: Problem, tape: Tape, debts: Debts, tables: Tables, memories: slice, start: int, steps: slice
) -> None:
    if memories.start >= memories.stop:
        return
    groups, columns = p.keys.shape[0], slice(CHUNK + memories.start, CHUNK + memories.stop)
    queries = tape.queries[:, start + steps.start : start + steps.stop]
    for g in range(groups):
        layers = slice(g, None, groups)
        for debt, weight, vector in (
            (debts.keys, tables.scores[:, steps, layers, columns], queries[:, :, layers]),
            (
                debts.values,
                tables.probabilities[:, steps, layers, memories],
                tables.answers[:, steps, layers],
            ),
        ):
            owed = torch.bmm(weight.flatten(1, 2).transpose(1, 2), vector.flatten(1, 2))
            # Adding into the rows of a larger buffer would make the library compute head by head.
            debt[g].flatten(0, 1)[:, memories].add_(owed)


class Chunk(NamedTuple):
    r"""The factors of the weight gradients for 16 steps, `[L, 16, B, ...]`, and the normalised rows."""

    first: Tensor
    first_rstd: Tensor
    second: Tensor
    second_rstd: Tensor
    d_query: Tensor
    d_attended: Tensor
    d_hidden: Tensor
    d_output: Tensor
    zero: Tensor
    one: Tensor


def _chunk_backward(
    p: Problem,
    tape: Tape,
    memory: tuple[Tensor, Tensor],
    debts: Debts,
    tables: Tables,
    grad: Tensor,
    dx: Tensor,
    dw: FoldedWeights,
    start: int,
    stop: int,
) -> None:
    width, mixing = p.x.shape[2], p.weights.mixing.tolist()
    first, _, first_rstd = torch.native_layer_norm(tape.inputs[:, start:stop], [width], None, None, EPS)
    second, _, second_rstd = torch.native_layer_norm(tape.middles[:, start:stop], [width], None, None, EPS)
    one = first_rstd.new_ones(p.x.shape[1], 1)
    chunk = Chunk(
        first,
        first_rstd,
        second,
        second_rstd,
        torch.zeros_like(first),
        torch.zeros_like(first),
        torch.empty_like(tape.hidden[:, start:stop]),
        torch.empty_like(first),
        torch.zeros_like(one),
        one,
    )
    for t in reversed(range(start, stop)):
        dm = _memory_backward(p, tape, debts, chunk, t)
        dh = torch.add(grad[t], dm, alpha=mixing[-1])
        for layer in reversed(range(p.weights.query.shape[0])):
            dh = _feed_forward_backward(p, tape, chunk, dh, t, t - start, layer)
            if p.past(t).stop > 0:
                dh = _attend_backward(p, tape, memory, tables, chunk, dh, t, t - start, layer)
            dh = dh.add_(dm, alpha=mixing[layer])
        dx[t] = dh
        inside = slice(max(p.past(t).start, p.carried + start), p.carried + t)
        _pay(p, tape, debts, tables, inside, start, slice(t - start, t - start + 1))
    _pay(p, tape, debts, tables, p.past(start), start, slice(0, stop - start))
    _layer_weights(tape, chunk, dw, start, stop)
    _position_weights(p, tape, tables, dw, start, stop)


def _memory_backward(p: Problem, tape: Tape, debts: Debts, chunk: Chunk, t: int) -> Tensor:
    batch, now = p.x.shape[1], p.carried + t
    dkv = debts.key_value[t]
    dkv[:, :, 0] = debts.keys[:, :, :, now].permute(2, 0, 1, 3)
    dkv[:, :, 1] = debts.values[:, :, :, now].permute(2, 0, 1, 3)
    dm = dkv.view(batch, -1) @ p.weights.key_value.flatten(0, 1)
    if p.norm_memory:
        dm = _norm_backward(dm, tape.mixed[t], chunk).mul_(tape.mixed_rstd[t])
    debts.mixed[t] = dm
    return dm


# For $n = (x - \bar x)\, r$ the gradient is $\delta x = r\,(\delta n - \overline{\delta n} - n\,
# \overline{n\, \delta n})$. The library's operation gives the bracket when told that mean is 0 and $r$ is 1;
# the caller multiplies by $r$ while adding.
def _norm_backward(grad: Tensor, normalised: Tensor, chunk: Chunk) -> Tensor:
    return torch.ops.aten.native_layer_norm_backward(
        grad, normalised, [grad.shape[1]], chunk.zero, chunk.one, None, None, [True, False, False]
    )[0]


def _feed_forward_backward(
    p: Problem, tape: Tape, chunk: Chunk, dh: Tensor, t: int, i: int, layer: int
) -> Tensor:
    w = p.weights
    d_output = torch.mul(dh, p.noise[3][layer, t], out=chunk.d_output[layer, i]) if p.noise else dh
    if not p.noise:
        chunk.d_output[layer, i] = dh
    df = d_output @ w.layer2[layer]
    if p.noise:
        df.mul_(p.noise[2][layer, t])
    # A hidden number is positive exactly where the ReLU let it through and dropout let it live.
    df = torch.ops.aten.threshold_backward(df, tape.hidden[layer, t], 0)
    chunk.d_hidden[layer, i] = df
    dn = _norm_backward(df @ w.layer1[layer], chunk.second[layer, i], chunk)
    return torch.addcmul(dh, dn, chunk.second_rstd[layer, i])


def _attend_backward(
    p: Problem,
    tape: Tape,
    memory: tuple[Tensor, Tensor],
    tables: Tables,
    chunk: Chunk,
    dh: Tensor,
    t: int,
    i: int,
    layer: int,
) -> Tensor:
    w, past = p.weights, p.past(t)
    batch, heads, count = dh.shape[0], p.keys.shape[1], past.stop - past.start
    k, v = (rows(m, layer)[:, past] for m in memory)
    through = gate(p, t, layer)
    d_attended = dh if through is None else dh * through
    chunk.d_attended[layer, i] = d_attended
    answers = tables.answers[:, i, layer]
    answers.view(heads, batch, -1).copy_(
        (d_attended @ w.output[layer]).view(batch, heads, -1).transpose(0, 1)
    )
    if p.keep:
        weights = tape.probabilities[:, t, layer, past]
    else:
        weights = probabilities(p, memory[0], tape.queries[:, t, layer], t, layer)
    dp = torch.bmm(answers[:, None], v.transpose(1, 2)).view(-1, count)
    used = weights
    if p.noise:
        noise = p.noise[0][layer, t, :, :, past].reshape(-1, count)
        used = weights * noise
        dp.mul_(noise)
    ds = torch.ops.aten._softmax_backward_data(dp, weights, 1, dp.dtype)
    tables.scores[:, i, layer, CHUNK + past.start : CHUNK + past.stop] = ds
    tables.probabilities[:, i, layer, past] = used
    dq = torch.bmm(ds.view(heads, batch, count), w.positions[layer, :, -count:])
    dq.view(-1, 1, dq.shape[-1]).baddbmm_(ds[:, None], k)
    d_query = chunk.d_query[layer, i]
    d_query.view(batch, heads, -1).copy_(dq.transpose(0, 1))
    dn = _norm_backward(d_query @ w.query[layer], chunk.first[layer, i], chunk)
    return torch.addcmul(dh, dn, chunk.first_rstd[layer, i])


# Equation (1), for all layers of a chunk at once.
def _layer_weights(tape: Tape, chunk: Chunk, dw: FoldedWeights, start: int, stop: int) -> None:
    for weight, bias, left, right in (
        (dw.query, dw.query_bias, chunk.d_query, chunk.first),
        (dw.output, dw.output_bias, chunk.d_attended, tape.attended[:, start:stop]),
        (dw.layer1, dw.layer1_bias, chunk.d_hidden, chunk.second),
        (dw.layer2, dw.layer2_bias, chunk.d_output, tape.hidden[:, start:stop]),
    ):
        left = left.flatten(1, 2)
        weight.baddbmm_(left.transpose(1, 2), right.flatten(1, 2))
        bias.add_(left.sum(dim=1))


# By distance, the scores of step $t$ lie one column further right than those of step $t-1$. So a view whose
# rows are one element longer than the table's lines up equal distances. On the left it runs into the columns
# of zeros, which is what they are for.
def _position_weights(
    p: Problem, tape: Tape, tables: Tables, dw: FoldedWeights, start: int, stop: int
) -> None:
    reach, steps = min(p.window, p.carried + stop - 1), stop - start
    if reach == 0:
        return
    (heads, batch), layers, table = p.keys.shape[1:3], p.weights.query.shape[0], tables.scores
    row = table.shape[3]
    skewed = table.as_strided(
        (heads, layers, batch, steps, reach),
        (batch * table.stride(0), row, table.stride(0), table.stride(1) + 1, 1),
        CHUNK + p.carried + start - reach,
    ).reshape(heads * layers, batch * steps, reach)
    queries = tape.queries[:, start:stop].unflatten(0, (heads, batch)).permute(0, 3, 1, 2, 4)
    queries = queries.reshape(heads * layers, batch * steps, -1)
    product = torch.bmm(skewed.transpose(1, 2), queries).unflatten(0, (heads, layers))
    dw.positions[:, :, -reach:] += product.transpose(0, 1)
    dw.position_bias[:, :, -reach:] += skewed.sum(dim=1).unflatten(0, (heads, layers)).transpose(0, 1)


def memory_weights(tape: Tape, outputs: Tensor, debts: Debts, dw: FoldedWeights) -> None:
    r"""Compute the gradients of what makes the memory, once, from all positions."""
    dkv = debts.key_value.flatten(0, 1).flatten(1)
    dw.key_value.flatten(0, 1).copy_(dkv.t() @ tape.mixed.flatten(0, 1))
    dw.key_value_bias.flatten().copy_(dkv.sum(dim=0))
    # The mixture's weights take one inner product a layer. Each layer's output is the next one's input.
    dm = debts.mixed.flatten()
    dw.mixing[:-1] = tape.inputs.flatten(1) @ dm
    dw.mixing[-1] = outputs.flatten() @ dm

r"""One position, in plain PyTorch.

Whoever writes a text computes one position at a time, and uses every weight of the model for a single row.
There is nothing to gain in arithmetic: a step can at best be as fast as the weights come from memory. Walked
through module by module it is not. At $D = 256$ and $L = 6$ a quarter of the time went into calling modules
and looking for their parameters.

So a step is written as a function of tensors. What is kept between steps is *which* tensors, never what is in
them. Nothing is folded or packed that could become stale: whatever happens to a model between two steps, the
next one computes with what is there.

:paper: fan2020
:terms:
    q: q
    u: query_pos_bias
    U_r: embeddings
    S_r: bias
    K_j: k
    V_j: v
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from postil.mixers.feedback.attention import reachable
from postil.mixers.feedback.layer import LayerWeights
from postil.mixers.feedback.memory import FeedbackState

__all__ = ["Operands", "Plan", "Projection", "hooks_below", "plan", "step"]


class Projection(NamedTuple):
    r"""What makes keys and values of a memory vector."""

    key: Float[Tensor, "D D"]
    value: Float[Tensor, "D D"]
    value_bias: Float[Tensor, "D"] | None


class Operands(NamedTuple):
    r"""The parameters of a model, except for the mixture; of norms, `memory` and `final`, gain and shift."""

    layers: Sequence[LayerWeights]
    projections: Sequence[Projection]
    memory: tuple[Tensor, Tensor] | None
    final: tuple[Tensor, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        r"""All of them, one after the other."""
        rows = [t for row in (*self.layers, *self.projections) for t in row if t is not None]
        return [*rows, *(self.memory or ()), *self.final]


# ## What is kept
#
# A plan holds as long as the model is put together from the very same parts. An exchanged layer, another
# activation or a hook on any part ends it: whoever hooks into a module wants to see it run.
@dataclass(eq=False)
class Plan:
    r"""The operands of a model's steps, and how to find out whether they still are."""

    operands: Operands
    links: list[tuple[dict[str, Any], str, Any]]
    hooks: list[Mapping[int, Any]]

    def holds(self) -> bool:
        r"""Say whether the model is still what the plan was made for."""
        for owner, name, part in self.links:
            if owner.get(name) is not part:
                return False
        return not any(self.hooks)


_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def plan(model: nn.Module, operands: Callable[[], Operands | None]) -> Plan | None:
    r"""Give the plan of a model, or `None` where its steps must go through its modules.

    `operands` is asked when there is no plan that holds.
    """
    known = _plans.get(model)
    if known is not None and known.holds():
        return known
    found = operands()
    if found is None or any(type(t) not in (Tensor, nn.Parameter) for t in found.tensors):
        return None
    made = Plan(found, _links(model), hooks_below(model))
    # What was computed for this step, by a parametrization for one, is another tensor the next time.
    own = {id(parameter) for parameter in model.parameters()}
    if all(id(t) in own for t in found.tensors):
        _plans[model] = made
    return made


def hooks_below(model: nn.Module) -> list[Mapping[int, Any]]:
    r"""Give all tables of forward hooks below a model, empty ones too; its own are called in any case."""
    below = (module for module in model.modules() if module is not model)
    return [hooks for module in below for hooks in (module._forward_pre_hooks, module._forward_hooks)]


def _links(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    links = []
    for module in model.modules():
        attributes = vars(module)
        # Whether a module is in training mode matters only where it has a dropout.
        names = ("activation", "p", "eps", *(["training"] if "dropout" in module._modules else []))
        rules = {name: attributes[name] for name in names if name in attributes}
        for owner, parts in (
            (attributes, rules | {"forward": None}),
            (module._modules, module._modules),
            (module._parameters, module._parameters),
        ):
            links += [(owner, name, part) for name, part in parts.items()]
    return links


# ## The step
#
# The rows of a step are few, and so every call counts. The sums below are those of the recurrence's page, in
# as few calls as PyTorch allows. `torch.baddbmm` adds a product to what is there already: the keys' product
# goes right on top of the positions' product.
def step(
    plan: Plan,
    x: Float[Tensor, "B D"],
    state: FeedbackState,
    count: int,
    mixing: Float[Tensor, "N"],
) -> Float[Tensor, "B D"]:
    r"""Compute one position, which reads `count` memories; write its own into the last row of `state`.

    Source: [fan2020], Section 3.
    Cost: $L (10 D^2 + S D) + 2 G D^2$ multiplications a row, where $G$ is the number of keys a position has.
    """
    layers, projections, memory, final = plan.operands
    now, (batch, width) = state.stop - 1, x.shape
    past = slice(now - count, now)
    keys, values = (_by_head(rows[past]) for rows in (state.keys, state.values))
    hidden = None if state.real is None else ~state.real[past].t()
    # As for a whole sequence, autocast would round the weights anew at every step. It is kept out.
    with torch.autocast(x.device.type, enabled=False):
        outputs = [x]
        for index, layer in enumerate(layers):
            g = index % len(keys)
            outputs.append(_layer(outputs[-1], layer, keys[g], values[g], hidden))
        m = torch.mv(torch.stack(outputs).flatten(1).t(), mixing).view(batch, width)
        if memory is not None:
            m = torch.layer_norm(m, [width], *memory)
        for g, (key, value, bias) in enumerate(projections):
            state.keys[now, :, g] = F.linear(m, key).view(batch, *state.keys.shape[3:])
            state.values[now, :, g] = F.linear(m, value, bias).view(batch, *state.keys.shape[3:])
        return torch.layer_norm(outputs[-1], [width], *final)


# A state keeps the positions of one head together, so nothing is copied here.
def _by_head(rows: Float[Tensor, "S B G H E"]) -> list[Float[Tensor, "_ S E"]]:
    return [group.flatten(0, 1) for group in rows.permute(2, 3, 1, 0, 4)]


def _layer(
    h: Float[Tensor, "B D"],
    w: LayerWeights,
    k: Float[Tensor, "_ S E"],
    v: Float[Tensor, "_ S E"],
    hidden: Bool[Tensor, "B S"] | None,
) -> Float[Tensor, "B D"]:
    width = [h.shape[1]]
    n = torch.layer_norm(h, width, w.attn_gain, w.attn_shift)
    z = F.linear(_attend(n, w, k, v, hidden), w.output, w.output_bias)
    # A row that may read nothing skips attention, the bias of its output included.
    if hidden is not None:
        z = z.masked_fill(hidden.all(dim=1, keepdim=True), 0.0)
    h = h + z
    n = torch.layer_norm(h, width, w.ff_gain, w.ff_shift)
    return h + F.linear(F.linear(n, w.layer1, w.layer1_bias).relu_(), w.layer2, w.layer2_bias)


# $$s A_j = s (q + u) \cdot K_j + s (q \cdot U_r + S_r)$$
#
# with $s = 1/\sqrt E$. A distance is the same for all rows of the batch, a key is not. So the first product
# has one matrix a head, the second one a head and row.
def _attend(
    n: Float[Tensor, "B D"],
    w: LayerWeights,
    k: Float[Tensor, "_ S E"],
    v: Float[Tensor, "_ S E"],
    hidden: Bool[Tensor, "B S"] | None,
) -> Float[Tensor, "B D"]:
    (heads, width), batch, count = w.query_pos_bias.shape, n.shape[0], k.shape[1]
    embeddings, bias = reachable(w.key_pos_embeddings, count), reachable(w.key_pos_bias, count)
    q = F.linear(n, w.query).view(batch, heads, width)
    by_distance = torch.baddbmm(bias.t()[:, None], q.transpose(0, 1), embeddings.permute(1, 2, 0))
    with_u = (q + w.query_pos_bias).transpose(0, 1).reshape(heads * batch, 1, width)
    scores = torch.baddbmm(
        by_distance.view(heads * batch, 1, count), with_u, k.mT, beta=width**-0.5, alpha=width**-0.5
    )
    if hidden is not None:
        by_head = scores.view(heads, batch, count)
        scores = by_head.masked_fill(hidden, torch.finfo(n.dtype).min).view_as(scores)
    answer = torch.bmm(scores.softmax(-1), v).view(heads, batch, width)
    return answer.transpose(0, 1).reshape(n.shape)

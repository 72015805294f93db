r"""The recurrence of the Feedback Transformer: literally, and as one differentiable operation.

In a parallel transformer, layer $l$ reads only what layer $l-1$ wrote. The best representation of an earlier
position, the one at the top, is there, and no lower layer may look at it. The Feedback Transformer lets
every layer look. What position $t$ leaves behind for all later ones is one vector, a mixture of all its
layers:

$$m_t = \sum_{l=0}^{L} c_l\, x_t^l, \qquad c = \operatorname{softmax}(w) \tag{1}$$

and each layer reads the memory vectors of the last $\tau$ positions, by keys $W_K m_j$ and values $W_V m_j$:

$$\begin{aligned}
z_t^l &= x_t^{l-1} +
    \operatorname{Attention}^l\!\big(\operatorname{norm}(x_t^{l-1}),\ m_{t-\tau}, \dots, m_{t-1}\big) \\
x_t^l &= z_t^l + \operatorname{FFN}^l(\operatorname{norm}(z_t^l))
\end{aligned} \tag{2}$$

The price: layer 1 of position $t$ must wait for layer $L$ of position $t-1$. $T$ positions can no longer be
computed at once, and a straightforward program is five to ten times slower to train than a parallel
transformer. This page states the recurrence; the next ones compute the same numbers without that price.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from postil.mixers.feedback.attention import feedback_attention_reference

__all__ = [
    "FeedbackWeights",
    "FoldedWeights",
    "Memory",
    "Noise",
    "feedback_transformer_reference",
    "fold",
    "unfold",
]

Memory: TypeAlias = tuple[Float[Tensor, "_ B G H E"], Float[Tensor, "_ B G H E"]]
"""Keys and values of all memory vectors, oldest first. `G` is 1 where all layers share them, else `L`."""


class FeedbackWeights(NamedTuple):
    r"""All parameters, those of the layers stacked along their first axis; $N = L + 1$ and $C = 2 D$.

    The position tables hold distances $R, \dots, 1$, where $R$ is the farthest that this call can reach.
    `memory_gain` and `memory_shift` normalise the memory vectors, `final_gain` and `final_shift` the
    output; `None` leaves them as they are.
    """

    attn_gain: Float[Tensor, "L D"]
    attn_shift: Float[Tensor, "L D"]
    query: Float[Tensor, "L D D"]
    query_pos_bias: Float[Tensor, "L H E"]
    key_pos_embeddings: Float[Tensor, "L R H E"]
    key_pos_bias: Float[Tensor, "L R H"]
    output: Float[Tensor, "L D D"]
    output_bias: Float[Tensor, "L D"]
    ff_gain: Float[Tensor, "L D"]
    ff_shift: Float[Tensor, "L D"]
    layer1: Float[Tensor, "L F D"]
    layer1_bias: Float[Tensor, "L F"]
    layer2: Float[Tensor, "L D F"]
    layer2_bias: Float[Tensor, "L D"]
    mixing: Float[Tensor, "N"]
    key_value: Float[Tensor, "G C D"]
    key_value_bias: Float[Tensor, "G C"]
    memory_gain: Float[Tensor, "D"] | None
    memory_shift: Float[Tensor, "D"] | None
    final_gain: Float[Tensor, "D"] | None
    final_shift: Float[Tensor, "D"] | None


# Dropout draws random numbers, and a function that draws them cannot be compared with another one. So they
# are drawn first and handed in, like any other operand.
class Noise(NamedTuple):
    r"""What dropout multiplies with: zero where it hides a number, $1/(1-p)$ elsewhere."""

    attention: Float[Tensor, "L T H B S"]
    attended: Float[Tensor, "L T B D"]
    hidden: Float[Tensor, "L T B F"]
    output: Float[Tensor, "L T B D"]


# ## The equations, literally
#
# At the first position there is nothing to read, and attention is skipped: the residual path alone goes on.
# The paper's authors let memories of zeros take part in the first steps instead. A row whose memories are all
# padding is treated as being at its first position, so that padding in front changes nothing.
def feedback_transformer_reference(
    x: Float[Tensor, "T B D"],
    weights: FeedbackWeights,
    memory: Memory | None = None,
    allowed: Bool[Tensor, "#T S #B"] | None = None,
    window: int | None = None,
    noise: Noise | None = None,
) -> tuple[Float[Tensor, "T B D"], Memory]:
    r"""Eqs. (1) and (2), one position after the other.

    `memory` continues an earlier segment of $S - T$ positions. `allowed[t, j, b]` is true where position `t`
    may read memory `j`; it reads the last `window` at most.

    Source: [fan2020], Section 3. Deviation: attention is skipped, not fed zeros, where there is no memory.
    Cost: $L (12 D^2 + S D)$ multiplications a position, all positions one after the other.
    """
    keys, values = ([*rows] for rows in memory) if memory else ([], [])
    outputs = []
    for t, h in enumerate(x):
        layers = [h]
        for layer in range(weights.query.shape[0]):
            h = _layer_reference(h, layer, t, weights, keys, values, allowed, window, noise)
            layers.append(h)
        m = torch.einsum("l,lbd->bd", weights.mixing, torch.stack(layers))
        if weights.memory_gain is not None:
            m = F.layer_norm(m, m.shape[-1:], weights.memory_gain, weights.memory_shift)
        kv = torch.einsum("bd,gcd->bgc", m, weights.key_value) + weights.key_value_bias
        k, v = kv.unflatten(-1, (2, *weights.query_pos_bias.shape[1:])).unbind(2)
        keys.append(k)
        values.append(v)
        outputs.append(h)
    y = torch.stack(outputs) if outputs else x
    if weights.final_gain is not None:
        y = F.layer_norm(y, y.shape[-1:], weights.final_gain, weights.final_shift)
    return y, (_stacked(keys, x, weights), _stacked(values, x, weights))


def _layer_reference(
    h: Tensor,
    layer: int,
    t: int,
    w: FeedbackWeights,
    keys: list[Tensor],
    values: list[Tensor],
    allowed: Tensor | None,
    window: int | None,
    noise: Noise | None,
) -> Tensor:
    past = slice(max(0, len(keys) - (window or len(keys))), len(keys))
    if keys:
        g = layer % w.key_value.shape[0]
        k, v = torch.stack(keys[past])[:, :, g], torch.stack(values[past])[:, :, g]
        n = F.layer_norm(h, h.shape[-1:], w.attn_gain[layer], w.attn_shift[layer])
        q = (n @ w.query[layer].T).unflatten(-1, k.shape[-2:])
        # Equation (1) of the attention page.
        scores = torch.einsum("bhe,jbhe->jbh", q + w.query_pos_bias[layer], k)
        scores = scores + torch.einsum("bhe,jhe->jbh", q, w.key_pos_embeddings[layer, -k.shape[0] :])
        scores = scores + w.key_pos_bias[layer, -k.shape[0] :, None]
        may = None if allowed is None else allowed[min(t, allowed.shape[0] - 1), past]
        dropped = None if noise is None else noise.attention[layer, t, :, :, past].permute(2, 1, 0)
        z = feedback_attention_reference(scores, v, may, dropped).flatten(-2)
        z = z @ w.output[layer].T + w.output_bias[layer]
        z = z if noise is None else z * noise.attended[layer, t]
        h = h + (z if may is None else torch.where(may.any(dim=0)[:, None], z, 0.0))
    f = F.layer_norm(h, h.shape[-1:], w.ff_gain[layer], w.ff_shift[layer])
    f = F.relu(f @ w.layer1[layer].T + w.layer1_bias[layer])
    f = (f if noise is None else f * noise.hidden[layer, t]) @ w.layer2[layer].T + w.layer2_bias[layer]
    return h + (f if noise is None else f * noise.output[layer, t])


def _stacked(rows: list[Tensor], x: Tensor, w: FeedbackWeights) -> Tensor:
    empty = x.new_empty(0, x.shape[1], w.key_value.shape[0], *w.query_pos_bias.shape[1:])
    return torch.stack(rows) if rows else empty


# ## Folding
#
# Some of the arithmetic does not depend on the position at all, and need not be repeated $T$ times. A layer
# norm ends with a gain $g$ and a shift $\beta$, and a linear map follows:
#
# $$W (g \odot n + \beta) = (W \operatorname{diag} g)\, n + W \beta$$
#
# And the scores of attention, with the scale $s = 1/\sqrt{E}$ drawn in, complete to a single product, because
# the missing fourth term depends on the distance alone:
#
# $$s A_j = \underbrace{s (Q + u)}_{q} \cdot (K_j + U_r) + \underbrace{s S_r - s\, u \cdot U_r}_{S'_r}$$
class FoldedWeights(NamedTuple):
    r"""The same model with fewer parts: layer norms without gain and shift, one product a score.

    The position tables have the heads in front. $N = L + 1$ and $C = 2 D$, as above.
    """

    query: Float[Tensor, "L D D"]
    query_bias: Float[Tensor, "L D"]
    positions: Float[Tensor, "L H R E"]
    position_bias: Float[Tensor, "L H R"]
    output: Float[Tensor, "L D D"]
    output_bias: Float[Tensor, "L D"]
    layer1: Float[Tensor, "L F D"]
    layer1_bias: Float[Tensor, "L F"]
    layer2: Float[Tensor, "L D F"]
    layer2_bias: Float[Tensor, "L D"]
    mixing: Float[Tensor, "N"]
    key_value: Float[Tensor, "G C D"]
    key_value_bias: Float[Tensor, "G C"]


# Folding is ordinary differentiable code, so nobody has to derive its gradient by hand. It costs some passes
# over the weights a call, little beside $T$ products with them.
def fold(w: FeedbackWeights) -> FoldedWeights:
    r"""Draw gains, shifts, the scale and $u$ into the weights around them; not the final layer norm."""
    scale = w.query_pos_bias.shape[-1] ** -0.5
    query = scale * w.query * w.attn_gain[:, None]
    bias = scale * (torch.einsum("lcd,ld->lc", w.query, w.attn_shift) + w.query_pos_bias.flatten(1))
    # The query that meets $U_r$ alone includes the shift of its layer norm, but not $u$.
    meets = scale * torch.einsum("lhe,lrhe->lhr", w.query_pos_bias, w.key_pos_embeddings)
    key_value, key_value_bias = w.key_value, w.key_value_bias
    if w.memory_gain is not None and w.memory_shift is not None:
        key_value_bias = key_value_bias + key_value @ w.memory_shift
        key_value = key_value * w.memory_gain
    return FoldedWeights(
        query,
        bias,
        w.key_pos_embeddings.transpose(1, 2),
        scale * w.key_pos_bias.transpose(1, 2) - meets,
        w.output,
        w.output_bias,
        w.layer1 * w.ff_gain[:, None],
        w.layer1_bias + torch.einsum("lfd,ld->lf", w.layer1, w.ff_shift),
        w.layer2,
        w.layer2_bias,
        w.mixing,
        key_value,
        key_value_bias,
    )


# A folded model is still a Feedback Transformer, one whose layer norms happen to do nothing more than
# normalise. So the literal form can compute it, which is how second derivatives are had.
def unfold(w: FoldedWeights, norm_memory: bool) -> FeedbackWeights:
    r"""Give weights with which the literal form computes what the folded ones do."""
    heads, width = w.positions.shape[1], w.positions.shape[3]
    scale = width**-0.5
    u = w.query_bias.unflatten(-1, (heads, width)) / scale
    meets = torch.einsum("lhe,lhre->lhr", u, w.positions)
    one, zero = torch.ones_like(w.output_bias), torch.zeros_like(w.output_bias)
    return FeedbackWeights(
        one,
        zero,
        w.query / scale,
        u,
        w.positions.transpose(1, 2),
        (w.position_bias / scale + meets).transpose(1, 2),
        w.output,
        w.output_bias,
        one,
        zero,
        w.layer1,
        w.layer1_bias,
        w.layer2,
        w.layer2_bias,
        w.mixing,
        w.key_value,
        w.key_value_bias,
        one[0] if norm_memory else None,
        zero[0] if norm_memory else None,
        None,
        None,
    )

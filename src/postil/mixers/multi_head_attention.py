r"""Multi-head attention: every position reads every other at one price.

How can a position of a sequence use what stands at any other position, near or far, at the same cost? A
recurrent network must carry it along step by step. Attention looks it up: each position sends out a
*query*, every position offers a *key* and a *value*, and a query receives the average of the values,
weighted by how well their keys match.

$$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{E}}\right) V \tag{1}$$

One average can answer only one question about the context. So the width $D$ is divided among $H$ heads of
width $E = D / H$, each with projections of its own, and their answers are put side by side:

$$\mathrm{MultiHead}(X) = \big[\,\mathrm{head}_1; \dots; \mathrm{head}_H\,\big]\, W_O,
\qquad \mathrm{head}_h = \mathrm{Attention}(X W_Q^h,\; X W_K^h,\; X W_V^h)$$

![X goes through three projections to Q, K and V of a head; Q meets K in a square of scores; softmax makes a
lower triangle of weights of it; the weights times V are the head. The heads stand side by side and go through
one more projection to Y.](multi_head_attention.svg)

This page writes equation (1) literally, then computes it without ever holding the $T \times S$ weights, then
decodes with it one token at a time.

:paper: vaswani2017
:terms:
    Q: q
    K: k
    V: v
    W_O: output
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from postil.masks import Mask, MaskLike, as_mask, check_mask, dense_mask, hide_padding
from postil.mixer import CausalMixer, check_heads, check_probability, check_sizes

__all__ = [
    "KeyValueState",
    "MultiHeadAttention",
    "PrepareForMultiHeadAttention",
    "attention",
    "attention_reference",
    "attention_weights",
]


# ## The equation, literally
#
# The weights come first: they are what one wants to look at. Position `i` of batch row `b` spends
# `weights[i, :, b, h]` on the positions it reads, and they sum to one.
def attention_weights(
    scores: Float[Tensor, "T S B H"], allowed: Bool[Tensor, "#T S #B #H"]
) -> Float[Tensor, "T S B H"]:
    r"""Softmax of the scores over the keys that each query is allowed; a row that may read nothing is zero.

    Source: [vaswani2017], Eq. 1. Deviation: the paper leaves empty rows undefined.
    Cost: $T S B H$ time and memory.
    """
    # The softmax of a row of $-\infty$ is $0/0$. Repairing it afterwards mends the output and leaves NaN in
    # the gradient, so an empty row gets finite scores first and is set to zero after.
    empty = ~allowed.any(dim=1, keepdim=True)
    return scores.masked_fill(~(allowed | empty), -math.inf).softmax(dim=1).masked_fill(empty, 0.0)


def attention_reference(
    q: Float[Tensor, "T B H E"],
    k: Float[Tensor, "S B H E"],
    v: Float[Tensor, "S B H E"],
    mask: Mask,
    dropout_prob: float = 0.0,
) -> Float[Tensor, "T B H E"]:
    r"""Equation (1), with the weights written out.

    Source: [vaswani2017], Eq. 1 and Section 3.2.1.
    Cost: $T S D$ time, $T S H$ memory a batch row.
    """
    scores = torch.einsum("ibhe,jbhe->ijbh", q / math.sqrt(q.shape[-1]), k)
    allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device)[..., None]
    weights = F.dropout(attention_weights(scores, allowed), dropout_prob)
    return torch.einsum("ijbh,jbhe->ibhe", weights, v)


# ## The fast form
#
# The softmax needs two sums, and both can be kept up to date while the keys pass by once:
#
# $$y = \frac{\sum_j e^{s_j - m}\, v_j}{\sum_j e^{s_j - m}}, \qquad m = \max_j s_j$$
#
# When a larger score raises $m$, both sums shrink by $e^{m_{\text{old}} - m}$. So a block of queries walks
# over blocks of keys and no weight is ever stored. PyTorch ships this walk, forward and backward.
def attention(
    q: Float[Tensor, "T B H E"],
    k: Float[Tensor, "S B H E"],
    v: Float[Tensor, "S B H E"],
    mask: Mask,
    dropout_prob: float = 0.0,
) -> Float[Tensor, "T B H E"]:
    r"""Equation (1) in one pass over the keys, without storing the weights.

    Numerator and denominator of the softmax are running sums relative to a running maximum; scaling all
    terms by $e^{-m}$ cancels in the quotient. With a window, each block of queries meets only its keys.

    Source: [dao2022], Algorithm 1. Deviation: with dropout PyTorch's CPU kernel stores the weights.
    Cost: $T S D$ time, or $T\,\mathrm{window}\,D$; $T D$ memory, and $T S$ booleans for other masks.
    """
    mask = mask.reduced(q.shape[0], k.shape[0])
    check_mask(mask, q.shape[0], k.shape[0], q.shape[1])
    if mask.window is not None and q.shape[0] > 1:
        return _windowed_attention(q, k, v, mask, dropout_prob)
    return _attend(q, k, v, mask, dropout_prob)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout_prob: float) -> Tensor:
    allowed = None
    plain_causal = mask.causal and mask.offset == 0 and mask.keys is None and mask.dense is None
    if not mask.is_full and not (plain_causal and mask.window is None):
        allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device).permute(2, 0, 1)[:, None]
    # PyTorch's axes here are batch, head, position, channel. Permuting costs nothing: only strides change.
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    # A traced length makes this a symbol; the kernel wants a plain truth value.
    causal = bool(allowed is None and plain_causal)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout_prob, is_causal=causal)
    return y.permute(2, 0, 1, 3)


# A window of $W$ keys lets a block of $C$ queries read at most $C + 2W$ keys. Cutting the sequence into
# blocks turns the quadratic cost into a linear one; $C = W$ wastes at most two thirds of the products, and
# short windows take longer blocks so that each call has enough to do.
def _windowed_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout_prob: float) -> Tensor:
    assert mask.window is not None
    length, keys = q.shape[0], k.shape[0]
    block = max(mask.window, 128)
    rows = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = min(max(0, mask.offset + start - mask.window + 1), keys)
        last = mask.offset + stop + (0 if mask.causal else mask.window - 1)
        queries, read = slice(start, stop), slice(first, max(first, min(last, keys)))
        part = mask.cut(queries, read).reduced(stop - start, read.stop - first)
        rows.append(_attend(q[queries], k[read], v[read], part, dropout_prob))
    return torch.cat(rows)


# ## The state
#
# To decode token by token, a query must meet all earlier keys and values again; projecting them anew for
# every token would cost $T^2$ projections for a text of $T$ tokens. So they are kept. A buffer with room to
# spare takes new rows without copying the old ones, and doubles when it is full.
class KeyValueState(NamedTuple):
    r"""Keys and values of the positions so far: rows `start` to `stop` of the buffers are alive.

    A state is a value. Two states may share buffers, as a longer one continues a shorter one; `written`
    counts the rows of the shared buffers already taken, so that two different continuations of one state
    part ways instead of overwriting each other.
    """

    keys: Float[Tensor, "C B H E"]
    values: Float[Tensor, "C B H E"]
    start: int
    stop: int
    written: Tensor

    @property
    def live(self) -> slice:
        r"""The rows that hold positions still within reach."""
        return slice(self.start, self.stop)


def _extend(state: KeyValueState | None, k: Tensor, v: Tensor) -> KeyValueState:
    if state is None:
        return KeyValueState(k, v, 0, k.shape[0], torch.tensor(k.shape[0]))
    if k.shape[1] != state.keys.shape[1]:
        raise ValueError(
            f"the state is of a batch of {state.keys.shape[1]}, the input of a batch of {k.shape[1]}"
        )
    # Where gradients flow or a graph is traced, rows written in place would change tensors already saved.
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and (k.requires_grad or state.keys.requires_grad)
    ):
        keys, values = (
            torch.cat([old[state.live], new]) for old, new in ((state.keys, k), (state.values, v))
        )
        return KeyValueState(keys, values, 0, keys.shape[0], torch.tensor(keys.shape[0]))
    stop = state.stop + k.shape[0]
    if stop > state.keys.shape[0] or int(state.written) != state.stop:
        state = _reallocate(state, spare=k.shape[0])
        stop = state.stop + k.shape[0]
    state.keys[state.stop : stop] = k
    state.values[state.stop : stop] = v
    state.written.fill_(stop)
    return state._replace(stop=stop)


# In memory the buffers lie head by head. A step reads all rows of a head one after the other, which takes
# half the time of picking its few channels out of every row.
def _reallocate(state: KeyValueState, spare: int) -> KeyValueState:
    count = state.stop - state.start
    capacity = max(2 * (count + spare), 64)
    buffers = []
    for old in (state.keys, state.values):
        _, batch, heads, channels = old.shape
        new = old.new_zeros(batch, heads, capacity, channels).permute(2, 0, 1, 3)
        new[:count] = old[state.live]
        buffers.append(new)
    return KeyValueState(buffers[0], buffers[1], 0, count, torch.tensor(count))


# ## The modules
class PrepareForMultiHeadAttention(nn.Module):
    r"""Project the last axis and split it into heads: `[S, B, D] -> [S, B, H, E]`, `[B, D] -> [B, H, E]`.

    Source: [vaswani2017], Section 3.2.2.
    """

    def __init__(self, d_model: int, heads: int, d_k: int, bias: bool):
        super().__init__()
        check_sizes(d_model=d_model, heads=heads, d_k=d_k)
        self.heads = heads
        self.d_k = d_k
        self.linear = nn.Linear(d_model, heads * d_k, bias=bias)

    def forward(self, x: Float[Tensor, "*positions D"]) -> Float[Tensor, "*positions H E"]:
        r"""Project and split."""
        return self.linear(x).unflatten(-1, (self.heads, self.d_k))


class MultiHeadAttention(CausalMixer):
    r"""Multi-head attention with its four projections.

    `bias` governs the projections of query and key; those of value and output always have one. `window`
    limits every query to the keys less than `window` positions away, and the decoding state with it.

    Source: [vaswani2017], Section 3.2.2; the window: [child2019]. Deviation: dropout on the weights, as in
    the authors' code; the paper names it only for sub-layer outputs.

    Raises:
        ValueError: `d_model` is not a multiple of `heads`, or a size or probability is out of range.
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        window: int | None = None,
    ):
        super().__init__()
        check_sizes(heads=heads, d_model=d_model, window=1 if window is None else window)
        check_probability(dropout_prob=dropout_prob)
        check_heads(d_model, heads)
        self.d_model = d_model
        self.heads = heads
        self.d_k = d_model // heads
        self.dropout_prob = dropout_prob
        self.window = window
        self.query = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.key = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.value = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=True)
        self.output = nn.Linear(d_model, d_model)

    def reset_parameters(self) -> None:
        r"""Draw the four projections anew, by the rule of `torch.nn.Linear`."""
        for linear in (self.query.linear, self.key.linear, self.value.linear, self.output):
            linear.reset_parameters()

    def forward(
        self,
        *,
        query: Float[Tensor, "T B D"],
        key: Float[Tensor, "S B D"],
        value: Float[Tensor, "S B D"],
        mask: MaskLike = None,
    ) -> Float[Tensor, "T B D"]:
        r"""Attend from every query to the keys that `mask` allows.

        Raises:
            ValueError: lengths, batches or widths do not fit together, or the mask does not fit them.
            TypeError: the mask is neither boolean nor integer.
        """
        return self.output(
            self._read(*self.operands(query=query, key=key, value=value, mask=mask)).flatten(-2)
        )

    # These are the arguments of equation (1). Keeping the step apart lets a test put the literal form in the
    # place of the fast one, with everything around it equal.
    def operands(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: MaskLike = None
    ) -> tuple[Tensor, Tensor, Tensor, Mask]:
        r"""Check, hide padding, project: the arguments of `attention` and `attention_reference`."""
        self._check(query, key, value)
        mask = self._within_window(as_mask(mask))
        if mask.dense is not None:
            self.prepare_mask(mask.dense, query.shape, key.shape)
        check_mask(mask, query.shape[0], key.shape[0], key.shape[1])
        hidden = hide_padding(key, mask)
        value = hidden if value is key else hide_padding(value, mask)
        query = hidden if query is key else query
        return self.query(query), self.key(hidden), self.value(value), mask

    def get_scores(
        self, query: Float[Tensor, "T B H E"], key: Float[Tensor, "S B H E"]
    ) -> Float[Tensor, "T S B H"]:
        r"""Compute $S_{ijbh} = \sum_e Q_{ibhe} K_{jbhe}$, before the scale $1/\sqrt{E}$.

        Override it to make another attention. The last query stands at the position of the last key when a
        sequence is decoded, so a relative rule counts from there: query `i` is at `S - T + i`.
        """
        return torch.einsum("ibhe,jbhe->ijbh", query, key)

    def prepare_mask(
        self, mask: Bool[Tensor, "#T S #B"], query_shape: torch.Size, key_shape: torch.Size
    ) -> Bool[Tensor, "#T S #B 1"]:
        r"""Check the three axes of a mask and add the axis of heads.

        Raises:
            ValueError: an axis fits neither the sequence nor, where that is allowed, 1.
        """
        check_mask(Mask(dense=mask), query_shape[0], key_shape[0], query_shape[1])
        return mask[..., None]

    def weights(
        self, *, query: Float[Tensor, "T B D"], key: Float[Tensor, "S B D"], mask: MaskLike = None
    ) -> Float[Tensor, "T S B H"]:
        r"""Compute the attention weights, before dropout, for a plot or another computation.

        They are computed when asked for and kept by nobody. Cost: $T S B H$ memory.
        """
        q, k, _, rules = self.operands(query=query, key=key, value=key, mask=mask)
        return self._weights(q, k, rules)

    # A subclass that changes the scores must really change the result, so it takes the general form, with the
    # scores written out. In half precision raw scores overflow before the scale can help ($64$ channels of
    # $64 \cdot 64$ are past the largest float16), hence float32 there.
    def _weights(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = self.get_scores(q.to(wide), k.to(wide)) / math.sqrt(self.d_k)
        allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device)
        return attention_weights(scores, self.prepare_mask(allowed, q.shape[:2], k.shape[:2])).to(q.dtype)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        dropout_prob = self.dropout_prob if self.training else 0.0
        if not self._overridden("get_scores") and not self._overridden("prepare_mask"):
            return attention(q, k, v, mask, dropout_prob)
        weights = F.dropout(self._weights(q, k, mask), dropout_prob)
        return torch.einsum("ijbh,jbhe->ibhe", weights, v)

    def _overridden(self, name: str) -> bool:
        return getattr(getattr(self, name), "__func__", None) is not getattr(MultiHeadAttention, name)

    # ## Decoding
    def prefill(
        self, x: Float[Tensor, "T B D"], state: KeyValueState | None = None
    ) -> tuple[Float[Tensor, "T B D"], KeyValueState]:
        r"""Attend causally from a chunk to everything before it and to itself.

        Cost: $T S D$ time for $S$ positions so far; the state holds $2 S D$ numbers a batch row, or
        at most about four windows' worth.
        """
        q, k, v, mask = self.operands(query=x, key=x, value=x, mask=Mask(causal=True))
        state = _extend(state, k, v)
        keys, values = state.keys[state.live], state.values[state.live]
        mask = Mask(causal=True, window=mask.window, offset=keys.shape[0] - x.shape[0])
        y = self.output(self._read(q, keys, values, mask).flatten(-2))
        # A key that has left the window is never read again; the next reallocation gives up its row.
        if self.window is not None:
            state = state._replace(start=max(state.start, state.stop - self.window + 1))
        return y, state

    def _within_window(self, mask: Mask) -> Mask:
        if self.window is None:
            return mask
        window = self.window if mask.window is None else min(mask.window, self.window)
        return Mask(mask.causal, mask.keys, mask.dense, window, mask.offset)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            raise ValueError(
                f"key {list(key.shape)} and value {list(value.shape)} must have the same shape [S, B, D]"
            )
        if query.shape[1:] != key.shape[1:] or query.shape[-1] != self.d_model:
            raise ValueError(
                f"query {list(query.shape)} and key {list(key.shape)} must agree in batch and in width "
                f"d_model={self.d_model}; only their lengths may differ"
            )


# ## What to try next
#
# Two heads of an untrained model on six positions: each row is a query and spends a total of 1 on what it
# may read. Without the mask the triangle becomes a square; with `window=3` three diagonals are left.
#
# ```python example T=6 B=3 D=16 H=2
# torch.manual_seed(3)
# mixer = MultiHeadAttention(heads=2, d_model=16, dropout_prob=0.0)
# x = 3 * torch.randn(6, 3, 16)
# y = mixer(query=x, key=x, value=x, mask=Mask(causal=True))
# weights = mixer.weights(query=x, key=x, mask=Mask(causal=True))
# plots = {
#     "Weights of head 1: rows read columns": weights[:, :, 0, 0],
#     "Weights of head 2": weights[:, :, 0, 1],
# }
# ```
#
# The same pictures of a trained model, on a text of yours:
#
# ```sh
# make demo
# postil show runs/demo --prompt "It is the east, and Juliet is the sun."
# ```

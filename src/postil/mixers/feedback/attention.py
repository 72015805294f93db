r"""Feedback attention: one position reads the memory.

In the Feedback Transformer [fan2020] the sequence is computed one position at a time, and what a position
may read is a growing list of *memory vectors*, one for each earlier position. So there is a single query,
and no mask is needed to hide the future: it does not exist yet.

A query must know how long ago a memory was written. Positions are counted backwards from the query, and a
learned vector $U_r$ belongs to each distance $r = t - j$. With keys $K_j + U_r$ and a query $Q + u$ the
product has four terms:

$$(Q + u) \cdot (K_j + U_r) = Q \cdot K_j + u \cdot K_j + Q \cdot U_r + u \cdot U_r$$

The last one does not depend on the content at all, only on the distance. It is given a parameter of its own,
$S_r$, and the score is

$$A_j = (Q + u) \cdot K_j + Q \cdot U_r + S_r, \qquad
z = \sum_j \operatorname{softmax}_j\!\left(\frac{A_j}{\sqrt{E}}\right) V_j \tag{1}$$

All tables start at zero, so an untrained model does not yet care about distances.

:paper: fan2020
:terms:
    Q: query, q
    K_j: key, k
    V_j: value, v
    u: u, query_pos_bias
    U_r: embeddings, key_pos_embeddings
    S_r: key_pos_bias
    b_r: by_distance
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from postil.mixer import check_heads, check_probability, check_sizes

__all__ = ["FeedbackAttention", "feedback_attention", "feedback_attention_reference", "reachable"]


# The last row of a table belongs to distance 1, the row before it to distance 2. A memory that grows in front
# then never renumbers the rows that are in use.
def reachable(table: Float[Tensor, "P *row"], distances: int) -> Float[Tensor, "R *row"]:
    r"""Take the rows of the distances $R, \dots, 2, 1$ from a table, in this order.

    Deviation: distances beyond the table share its first row, so that a memory may grow without limit; the
    paper's tables are as long as its windows.
    """
    missing = distances - table.shape[0]
    if missing > 0:
        return torch.cat([table[:1].expand(missing, *table.shape[1:]), table])
    return table[table.shape[0] - distances :]


def feedback_attention_reference(
    scores: Float[Tensor, "S B H"],
    value: Float[Tensor, "S B H E"],
    allowed: Bool[Tensor, "S #B"] | None = None,
    noise: Float[Tensor, "S B H"] | None = None,
) -> Float[Tensor, "B H E"]:
    r"""Average the values by the softmax of the scores, Eq. (1); a row that may read nothing gives zeros.

    `noise` multiplies the probabilities: zero where dropout hides one, $1/(1-p)$ elsewhere.

    Source: [fan2020], Eq. 2. Cost: $S D$ time, $S H$ memory a batch row.
    """
    scores = scores / math.sqrt(value.shape[-1])
    # An empty row of $-\infty$ would give $0/0$, in the gradient even if it is overwritten afterwards. The
    # smallest finite number gives it some distribution, which the second masking takes away.
    hidden = None if allowed is None else ~allowed[:, :, None]
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=0)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    if noise is not None:
        weights = weights * noise
    return torch.einsum("jbh,jbhe->bhe", weights, value)


# ## The fast form
#
# All that depends on the distance alone, or on it and the query, can be had before any key is touched:
#
# $$\frac{A_j}{\sqrt E} = \frac{(Q + u) \cdot K_j}{\sqrt E} + b_r, \qquad
# b_r = \frac{Q \cdot U_r + S_r}{\sqrt E}$$
#
# This is ordinary attention of the query $Q + u$ with a bias on its scores, for which there is a fused
# operation. The biases are one product for all rows of the batch, since distances know nothing of rows.
def feedback_attention(
    query: Float[Tensor, "B H E"],
    key: Float[Tensor, "S B H E"],
    value: Float[Tensor, "S B H E"],
    tables: tuple[Float[Tensor, "H E"], Float[Tensor, "S H E"], Float[Tensor, "S H"]],
    allowed: Bool[Tensor, "S #B"] | None = None,
    dropout_prob: float = 0.0,
) -> Float[Tensor, "B H E"]:
    r"""Compute Eq. (1) as attention with a bias; `tables` are $u$, $U$ and $S$, the last row at distance 1.

    Source: [fan2020], Eq. 2. Cost: $2 S D$ multiplications a batch row, in four operations.
    """
    u, embeddings, bias = tables
    scale = query.shape[-1] ** -0.5
    by_distance = torch.baddbmm(
        bias.t()[:, None], query.transpose(0, 1), embeddings.permute(1, 2, 0), beta=scale, alpha=scale
    )
    by_distance = by_distance.transpose(0, 1)[:, :, None]
    if allowed is not None:
        by_distance = by_distance.masked_fill(~allowed.t()[:, None, None], -math.inf)
    k, v = (rows.permute(1, 2, 0, 3) for rows in (key, value))
    y = F.scaled_dot_product_attention((query + u)[:, :, None], k, v, by_distance, dropout_prob)
    return y[:, :, 0]


class Heads(nn.Module):
    r"""Project the last axis and split it into heads; the map is called `linear`, as checkpoints call it."""

    def __init__(self, d_model: int, heads: int, bias: bool):
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(d_model, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*positions D"]) -> Float[Tensor, "*positions H E"]:
        r"""Project and split."""
        return self.linear(x).unflatten(-1, (self.heads, -1))


class FeedbackAttention(nn.Module):
    r"""Attention of one position to the memory, Eq. (1).

    With `is_kv_precomputed` it owns no projections of key and value: all layers then share keys and values,
    which somebody else computes. `positions` is the number of distances told apart.

    Source: [fan2020], Section 3.2; relative positions: [dai2019], Section 3.3. Deviation: $U_r$ is learned
    itself, not projected from sinusoids.

    Raises:
        ValueError: `d_model` is not a multiple of `heads`, or a size or probability is out of range.
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        *,
        is_kv_precomputed: bool = False,
        positions: int = 4096,
    ):
        super().__init__()
        check_sizes(heads=heads, d_model=d_model, positions=positions)
        check_probability(dropout_prob=dropout_prob)
        check_heads(d_model, heads)
        self.d_model = d_model
        self.heads = heads
        self.d_k = d_model // heads
        self.query = Heads(d_model, heads, bias=False)
        self.key = None if is_kv_precomputed else Heads(d_model, heads, bias=False)
        self.value = None if is_kv_precomputed else Heads(d_model, heads, bias=True)
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout_prob)
        self.key_pos_embeddings = nn.Parameter(torch.zeros(positions, heads, self.d_k))
        self.key_pos_bias = nn.Parameter(torch.zeros(positions, heads))
        self.query_pos_bias = nn.Parameter(torch.zeros(heads, self.d_k))

    def reset_parameters(self) -> None:
        r"""Set the tables to zero, and draw the projections anew by the rule of `torch.nn.Linear`."""
        for heads in (self.query, self.key, self.value):
            if heads is not None:
                heads.linear.reset_parameters()
        self.output.reset_parameters()
        for table in (self.key_pos_embeddings, self.key_pos_bias, self.query_pos_bias):
            nn.init.zeros_(table)

    def get_scores(
        self, query: Float[Tensor, "B H E"], key: Float[Tensor, "S B H E"]
    ) -> Float[Tensor, "S B H"]:
        r"""Compute $A_j = (Q + u) \cdot K_j + Q \cdot U_r + S_r$, before the scale $1/\sqrt{E}$.

        The last key is the most recent one, at distance 1. Override it to make another attention.
        """
        embeddings = reachable(self.key_pos_embeddings, key.shape[0])
        bias = reachable(self.key_pos_bias, key.shape[0])
        content = torch.einsum("bhe,jbhe->jbh", query + self.query_pos_bias, key)
        return content + torch.einsum("bhe,jhe->jbh", query, embeddings) + bias[:, None]

    def forward(
        self,
        *,
        query: Float[Tensor, "B D"],
        key: Float[Tensor, "_ _ *width"],
        value: Float[Tensor, "_ _ *width"],
        mask: Bool[Tensor, "_ _"] | None = None,
    ) -> Float[Tensor, "B D"]:
        r"""Read the memory `[S, B, D]`; `mask` `[S, B]` is true where a memory may be read.

        Keys and values that already have heads, `[S, B, H, E]`, are taken as they are.

        Raises:
            ValueError: key and value differ in shape, or are not projected and there is no projection.
        """
        if key.shape != value.shape or key.shape[1] != query.shape[0]:
            raise ValueError(
                f"key {list(key.shape)} and value {list(value.shape)} must have the same shape, with the "
                f"batch of {query.shape[0]} that query {list(query.shape)} has"
            )
        q, k, v = self.query(query), self._project(self.key, key), self._project(self.value, value)
        dropout = self.dropout.p if self.training else 0.0
        if type(self).get_scores is FeedbackAttention.get_scores:
            tables = (
                self.query_pos_bias,
                reachable(self.key_pos_embeddings, k.shape[0]),
                reachable(self.key_pos_bias, k.shape[0]),
            )
            return self.output(feedback_attention(q, k, v, tables, mask, dropout).flatten(-2))
        # A subclass with scores of its own gets its own scores.
        scores = self.get_scores(q, k)
        noise = F.dropout(torch.ones_like(scores), dropout) if dropout else None
        return self.output(feedback_attention_reference(scores, v, mask, noise).flatten(-2))

    def _project(self, heads: Heads | None, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return x
        if heads is None:
            raise ValueError(
                f"this attention takes keys and values with heads, [S, B, H, E], and got {list(x.shape)}; "
                f"build it with is_kv_precomputed=False to let it project memory vectors itself"
            )
        return heads(x)

r"""The layer of a Feedback Transformer.

A layer works on one position. What it reads, the memory, is handed to it: the layer does not know that its
own output is going to be part of what later positions read.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from postil.mixer import check_probability, check_sizes
from postil.mixers.feedback.attention import FeedbackAttention
from postil.transformer.feed_forward import FeedForward

__all__ = ["FeedbackTransformerLayer"]


class FeedbackTransformerLayer(nn.Module):
    r"""One layer at one position: feedback attention and a feed-forward network, pre-norm.

    Source: [fan2020], Eq. 4. Deviation: normalises before each part, where the paper normalises after.

    Raises:
        ValueError: `attn` is built for another width, or the probability is out of range.
    """

    def __init__(
        self, *, d_model: int, attn: FeedbackAttention, feed_forward: nn.Module, dropout_prob: float
    ):
        super().__init__()
        check_sizes(d_model=d_model)
        check_probability(dropout_prob=dropout_prob)
        if attn.d_model != d_model:
            raise ValueError(f"attn has d_model={attn.d_model}, the layer has d_model={d_model}")
        self.d_model = d_model
        self.attn = attn
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout_prob)
        self.norm_self_attn = nn.LayerNorm(d_model)
        self.norm_ff = nn.LayerNorm(d_model)

    def forward(
        self,
        *,
        x: Float[Tensor, "B D"],
        key: Float[Tensor, "S B *kd"] | None,
        value: Float[Tensor, "S B *kd"] | None,
        mask: Bool[Tensor, "S #B"] | None = None,
    ) -> Float[Tensor, "B D"]:
        r"""Compute one position; where there is no memory, or `mask` hides all of it, skip attention."""
        if key is not None and value is not None and key.shape[0] > 0:
            z = self.dropout(self.attn(query=self.norm_self_attn(x), key=key, value=value, mask=mask))
            # Even an answer of zero would add the output layer's bias.
            x = x + (z if mask is None else torch.where(mask.any(dim=0)[:, None], z, 0.0))
        return x + self.dropout(self.feed_forward(self.norm_ff(x)))

    @property
    def drops(self) -> bool:
        r"""True when dropout is on."""
        parts: list[Any] = [self.attn.dropout, self.dropout, self.feed_forward.dropout]
        return self.training and any(part.p > 0 for part in parts)

    # Whoever gives a layer another feed-forward network, or attention with other scores, gets what he asked
    # for: such a layer is computed by its own modules.
    @property
    def is_standard(self) -> bool:
        r"""True when the layer is exactly what `feedback_transformer` computes."""
        f = self.feed_forward
        return (
            type(self.attn) is FeedbackAttention
            and type(f) is FeedForward
            and (f.activation in (F.relu, torch.relu) or type(f.activation) is nn.ReLU)
            and f.layer1.bias is not None
            and f.layer2.bias is not None
        )

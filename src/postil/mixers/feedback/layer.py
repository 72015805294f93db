r"""The layer of a Feedback Transformer.

A layer works on one position. What it reads, the memory, is handed to it: the layer does not know that its
own output is going to be part of what later positions read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from postil.mixer import check_probability, check_sizes
from postil.mixers.feedback.attention import FeedbackAttention
from postil.mixers.feedback.plain import EPS
from postil.transformer.feed_forward import FeedForward

__all__ = ["FeedbackTransformerLayer", "LayerWeights", "runs_linear", "runs_norm"]


class LayerWeights(NamedTuple):
    r"""The parameters of one layer, except for projections of keys and values; `P` distances have a place."""

    attn_gain: Float[Tensor, "D"]
    attn_shift: Float[Tensor, "D"]
    query: Float[Tensor, "D D"]
    query_pos_bias: Float[Tensor, "H E"]
    key_pos_embeddings: Float[Tensor, "P H E"]
    key_pos_bias: Float[Tensor, "P H"]
    output: Float[Tensor, "D D"]
    output_bias: Float[Tensor, "D"]
    ff_gain: Float[Tensor, "D"]
    ff_shift: Float[Tensor, "D"]
    layer1: Float[Tensor, "F D"]
    layer1_bias: Float[Tensor, "F"]
    layer2: Float[Tensor, "D F"]
    layer2_bias: Float[Tensor, "D"]


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

    @property
    def weights(self) -> LayerWeights:
        r"""The parameters; only a standard layer has them all."""
        attn: Any = self.attn
        f: Any = self.feed_forward
        return LayerWeights(
            attn_gain=self.norm_self_attn.weight,
            attn_shift=self.norm_self_attn.bias,
            query=attn.query.linear.weight,
            query_pos_bias=attn.query_pos_bias,
            key_pos_embeddings=attn.key_pos_embeddings,
            key_pos_bias=attn.key_pos_bias,
            output=attn.output.weight,
            output_bias=attn.output.bias,
            ff_gain=self.norm_ff.weight,
            ff_shift=self.norm_ff.bias,
            layer1=f.layer1.weight,
            layer1_bias=f.layer1.bias,
            layer2=f.layer2.weight,
            layer2_bias=f.layer2.bias,
        )

    # Whoever gives a layer another feed-forward network, attention with other scores or an adapter around a
    # linear map gets what was asked for: such a layer is computed by its own modules.
    @property
    def is_standard(self) -> bool:
        r"""True when the layer is exactly what `feedback_transformer` computes."""
        attn, f = self.attn, self.feed_forward
        return (
            type(attn) is FeedbackAttention
            and type(f) is FeedForward
            and (f.activation in (F.relu, torch.relu) or type(f.activation) is nn.ReLU)
            and runs_linear(attn.query.linear, bias=False)
            and all(runs_linear(part, bias=True) for part in (attn.output, f.layer1, f.layer2))
            and runs_norm(self.norm_self_attn)
            and runs_norm(self.norm_ff)
        )


# A parametrized map has a class of its own, but still the `forward` of the linear map.
def runs_linear(module: nn.Module, bias: bool) -> bool:
    r"""Say whether a module computes what `torch.nn.Linear` does, with a bias or without one."""
    return _runs(module, nn.Linear) and (module.bias is not None) == bias


def runs_norm(module: nn.Module) -> bool:
    r"""Say whether a module computes what `torch.nn.LayerNorm` does by default."""
    return _runs(module, nn.LayerNorm) and bool(module.eps == EPS) and module.bias is not None


def _runs(module: nn.Module, kind: type[nn.Module]) -> bool:
    return getattr(module.forward, "__func__", None) is kind.forward

r"""The Feedback Transformer as modules: the original, and the one with shared keys and values.

The Feedback Transformer is a *backbone*, not a mixer: no single layer of it can be computed without all the
others, so it cannot be put together from independent layers. It fulfils the same protocol as a stack of
ordinary layers, `forward`, `prefill`, `step`, and takes its place in a language model.

In the original, each layer has projections of its own for the keys and values of the memory: $2L$ products
for each position, and a cache of $2 L D$ numbers a position for decoding. If all layers share one pair of
projections, $2$ products and $2 D$ numbers do. The paper finds the results as good; the cache is $L$ times
smaller than that of an ordinary transformer.

:paper: fan2020
:terms:
    L: n_layers, layers
    D: d_model
    m: m
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from postil.mixers.feedback.attention import Heads
from postil.mixers.feedback.backbone import FeedbackBackbone
from postil.mixers.feedback.layer import FeedbackTransformerLayer

__all__ = ["FeedbackTransformer", "FeedbackTransformerKV"]


class FeedbackTransformer(FeedbackBackbone):
    r"""The original: every layer projects the memory to keys and values of its own.

    `window` limits attention to that many memories. `combine` says how layers make a memory: "softmax" is a
    learned mixture, "mean" an even one, "top" the last layer alone. `norm_memory` normalises it. `recompute`
    keeps no probabilities for backward, which then takes less memory and more time; for long sequences.

    Source: [fan2020], Section 3. Deviation: pre-norm, as the layer.
    Cost: $L (14 D^2 + S D)$ multiplications a position; decoding remembers $2 L D$ numbers a position.

    Raises:
        ValueError: a size or choice is not possible, or `layer.attn` does not project keys and values.
    """

    def __init__(
        self,
        layer: FeedbackTransformerLayer,
        n_layers: int,
        *,
        window: int | None = None,
        combine: str = "softmax",
        norm_memory: bool = False,
        recompute: bool = False,
    ):
        super().__init__(layer, n_layers, window, combine, norm_memory, recompute)
        if layer.attn.key is None:
            raise ValueError(
                "the original projects keys and values in every layer; build FeedbackAttention with "
                "is_kv_precomputed=False, or use FeedbackTransformerKV"
            )

    def project(self, m: Tensor) -> tuple[Tensor, Tensor]:
        r"""Give what each layer makes of a memory vector."""
        attentions = [layer.attn for layer in self._layers]
        keys, values = [a.key(m) for a in attentions], [a.value(m) for a in attentions]
        return torch.stack(keys, dim=1), torch.stack(values, dim=1)

    def maps(self) -> list[tuple[Any, Any]]:
        r"""Give the maps of each layer."""
        return [(attn.key.linear, attn.value.linear) for attn in (layer.attn for layer in self._layers)]


class FeedbackTransformerKV(FeedbackBackbone):
    r"""The Feedback Transformer whose layers share keys and values.

    Source: [fan2020], Section 3 ("sharing key-value computation across layers").
    Cost: $L (10 D^2 + S D) + 2 D^2$ multiplications a position; decoding remembers $2 D$ numbers a position.

    Raises:
        ValueError: a size or choice is not possible, `d_model` or `heads` differ from the layer's, or
            `layer.attn` projects keys and values itself.
    """

    def __init__(
        self,
        layer: FeedbackTransformerLayer,
        n_layers: int,
        d_model: int,
        heads: int,
        *,
        window: int | None = None,
        combine: str = "softmax",
        norm_memory: bool = False,
        recompute: bool = False,
    ):
        if (d_model, heads) != (layer.d_model, layer.attn.heads):
            raise ValueError(
                f"d_model={d_model}, heads={heads} differ from the layer's d_model={layer.d_model}, "
                f"heads={layer.attn.heads}"
            )
        if layer.attn.key is not None:
            raise ValueError("shared keys and values: build FeedbackAttention with is_kv_precomputed=True")
        super().__init__(layer, n_layers, window, combine, norm_memory, recompute)
        self.key = Heads(d_model, heads, bias=False)
        self.value = Heads(d_model, heads, bias=False)

    def project(self, m: Tensor) -> tuple[Tensor, Tensor]:
        r"""Give the one key and value for all layers."""
        return self.key(m)[:, None], self.value(m)[:, None]

    def maps(self) -> list[tuple[Any, Any]]:
        r"""Give the one pair of maps."""
        return [(self.key.linear, self.value.linear)]

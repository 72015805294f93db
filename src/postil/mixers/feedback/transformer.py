r"""The Feedback Transformer as modules: the layer, the original, and the one with shared keys and values.

The Feedback Transformer is a *backbone*, not a mixer: no single layer of it can be computed without all the
others, so it cannot be put together from independent layers. It fulfils the same protocol as a stack of
ordinary layers, `forward`, `prefill`, `step`, and takes its place in a language model.

In the original, each layer has projections of its own for the keys and values of the memory: $2L$ products
for each position, and a cache of $2 L D$ numbers a position for decoding. If all layers share one pair of
projections, $2$ products and $2 D$ numbers do. The paper finds the results as good; the cache is $L$ times
smaller than that of an ordinary transformer.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from postil.masks import MaskLike, as_mask, check_mask, hide_padding
from postil.mixer import check_probability, check_sizes
from postil.mixers.feedback.attention import FeedbackAttention, Heads, reachable
from postil.mixers.feedback.memory import FeedbackState, Stack
from postil.mixers.feedback.operation import feedback_transformer
from postil.mixers.feedback.recurrence import FeedbackWeights, Memory, Noise
from postil.transformer.feed_forward import FeedForward
from postil.transformer.layers import clone_layers

__all__ = ["FeedbackTransformer", "FeedbackTransformerKV", "FeedbackTransformerLayer"]


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


class _Backbone(nn.Module):
    r"""What both models share: all but where keys and values come from."""

    def __init__(
        self,
        layer: FeedbackTransformerLayer,
        n_layers: int,
        window: int | None,
        combine: str,
        norm_memory: bool,
    ):
        super().__init__()
        check_sizes(n_layers=n_layers, window=1 if window is None else window)
        if combine not in ("softmax", "mean", "top"):
            raise ValueError(f"combine={combine!r} is not known; there are softmax, mean, top")
        self.d_model = layer.d_model
        self.heads = layer.attn.heads
        self.window = window
        self.combine = combine
        self.layers = clone_layers(layer, n_layers)
        self.norm = nn.LayerNorm(layer.d_model)
        self.weights = nn.Parameter(torch.ones(n_layers + 1)) if combine == "softmax" else None
        self.norm_memory = nn.LayerNorm(layer.d_model) if norm_memory else None

    # ## Where keys and values come from
    def key_value(self) -> tuple[Float[Tensor, "G C D"], Float[Tensor, "G C"]]:
        r"""Give the projections of a memory vector to keys and values, and their biases."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        r"""Draw all parameters anew; the mixture starts out even."""
        if self.weights is not None:
            nn.init.ones_(self.weights)
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

    def mixing(self) -> Float[Tensor, "N"]:
        r"""Give the weight of each layer in a memory vector, the input first.

        Source: [fan2020], Eq. 5; mean and top layer: Section 5.
        """
        if self.weights is not None:
            return self.weights.softmax(0)
        layers, like = len(self.layers), self.norm.weight.detach()
        if self.combine == "mean":
            return like.new_full((layers + 1,), 1 / (layers + 1))
        return F.one_hot(torch.tensor(layers, device=like.device), layers + 1).to(like.dtype)

    # ## The whole sequence
    def forward(self, x: Float[Tensor, "T B D"], mask: MaskLike = None) -> Float[Tensor, "T B D"]:
        r"""Compute all positions; each reads earlier ones only, whatever the mask.

        A mask may hide padding, or anything else, and narrow the window: `Mask(window=w)` counts the position
        itself, so it leaves `w - 1` memories.

        Raises:
            ValueError: `x` has another width, or the mask does not fit `x`.
        """
        return self._compute(*self.operands(x, mask))[0]

    def operands(
        self, x: Float[Tensor, "T B D"], mask: MaskLike = None, state: FeedbackState | None = None
    ) -> tuple[Tensor, FeedbackWeights, Memory | None, Tensor | None, int | None, Noise | None]:
        r"""Check, hide padding, gather: the arguments of `feedback_transformer` and its reference."""
        if x.shape[-1] != self.d_model:
            raise ValueError(f"x has width {x.shape[-1]}, the model has d_model={self.d_model}")
        mask = as_mask(mask)
        check_mask(mask, x.shape[0], x.shape[0], x.shape[1])
        window, allowed, memory = self.window, _allowed(mask.keys, mask.dense), None
        if mask.window is not None:
            window = min(mask.window - 1, mask.window if window is None else window)
        if state is not None:
            keys, values, real = state.memory
            memory = keys, values
            if keys.shape[1] != x.shape[1]:
                raise ValueError(
                    f"the state is of a batch of {keys.shape[1]}, the input of a batch of {x.shape[1]}"
                )
            allowed = _joined(real, allowed, keys.shape[0], x)
        if window == 0:
            # A window of one leaves only the position itself, which is not a memory.
            none = x.new_zeros(1, x.shape[0] + (memory[0].shape[0] if memory else 0), 1, dtype=torch.bool)
            window, allowed = None, none
        span = x.shape[0] + (0 if memory is None else memory[0].shape[0])
        reach = max(1, span - 1 if window is None else min(window, span - 1))
        noise = self._noise(x, span) if self.training else None
        return hide_padding(x, mask), self._gather(reach), memory, allowed, window, noise

    def _compute(self, *operands: object) -> tuple[Tensor, Memory]:
        if all(layer.is_standard for layer in self.layers):
            return feedback_transformer(*operands)  # type: ignore[arg-type]
        return self._walk(*operands)  # type: ignore[arg-type]

    # Layers of other kinds are walked through, module by module, and autograd records every step.
    def _walk(
        self,
        x: Tensor,
        w: FeedbackWeights,
        memory: Memory | None,
        allowed: Tensor | None,
        window: int | None,
        noise: Noise | None,
    ) -> tuple[Tensor, Memory]:
        keys, values = Stack(), Stack()
        carried = 0 if memory is None else memory[0].shape[0]
        for j in range(carried):
            assert memory is not None
            keys.append(j, memory[0][j])
            values.append(j, memory[1][j])
        outputs = []
        for t, h in enumerate(x):
            now = carried + t
            past = slice(max(0, now - (window or now)), now)
            may = None if allowed is None else allowed[min(t, allowed.shape[0] - 1), past]
            read = (keys.get()[past], values.get()[past]) if now else None
            h, k, v = self._position(h, read, may, w)
            keys.append(now, k)
            values.append(now, v)
            outputs.append(h)
        y = torch.stack(outputs) if outputs else x
        empty = x.new_empty(0, x.shape[1], w.key_value.shape[0], self.heads, self.d_model // self.heads)
        return self.norm(y), (keys.get(), values.get()) if carried + len(outputs) else (empty, empty)

    def _position(
        self, h: Tensor, read: Memory | None, may: Tensor | None, w: FeedbackWeights | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        key_value, bias = self.key_value() if w is None else (w.key_value, w.key_value_bias)
        mixing = self.mixing()
        m = h * mixing[0]
        for index, layer in enumerate(self.layers):
            g = index % key_value.shape[0]
            k, v = (None, None) if read is None else (read[0][:, :, g], read[1][:, :, g])
            h = layer(x=h, key=k, value=v, mask=may)
            m = m + h * mixing[index + 1]
        if self.norm_memory is not None:
            m = self.norm_memory(m)
        kv = F.linear(m, key_value.flatten(0, 1), bias.flatten())
        k, v = kv.view(h.shape[0], key_value.shape[0], 2, self.heads, -1).unbind(2)
        return h, k, v

    # ## Decoding
    def prefill(
        self, x: Float[Tensor, "T B D"], state: FeedbackState | None = None, *, mask: MaskLike = None
    ) -> tuple[Float[Tensor, "T B D"], FeedbackState]:
        r"""Compute a segment after what `state` remembers; `mask` describes the segment.

        Gradients flow through the state into the segment before, to the beginning of the text. Hand over
        `state.detached()` to cut them off there (truncated backpropagation).
        """
        mask = as_mask(mask)
        y, (keys, values) = self._compute(*self.operands(x, mask, state))
        real = None if state is None else state.memory[2]
        if real is not None or mask.keys is not None:
            seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            before = real if real is not None else seen.new_ones(keys.shape[0] - x.shape[0], x.shape[1])
            real = torch.cat([before, seen if mask.keys is None else mask.keys])
        return y, FeedbackState.of(keys, values, real, self.window)

    def step(
        self, x_t: Float[Tensor, "B D"], state: FeedbackState | None = None
    ) -> tuple[Float[Tensor, "B D"], FeedbackState]:
        r"""Compute one position. Time and memory are constant once a window is full.

        Cost: $L (12 D^2 + S D)$ multiplications.
        """
        if state is None:
            y, state = self.prefill(x_t[None])
            return y[0], state
        keys, values, may = state.memory
        h, k, v = self._position(x_t, (keys, values), may)
        return self.norm(h), state.append(k, v, self.window)

    # ## The operands
    def _gather(self, reach: int) -> FeedbackWeights:
        def stacked(*path: str) -> Tensor:
            return torch.stack([_reach_for(layer, path) for layer in self.layers])

        def table(name: str) -> Tensor:
            return torch.stack([reachable(getattr(layer.attn, name), reach) for layer in self.layers])

        key_value, key_value_bias = self.key_value()
        memory = self.norm_memory
        standard = all(layer.is_standard for layer in self.layers)
        none = self.norm.weight.new_empty(0)
        return FeedbackWeights(
            stacked("norm_self_attn", "weight"),
            stacked("norm_self_attn", "bias"),
            stacked("attn", "query", "linear", "weight"),
            stacked("attn", "query_pos_bias"),
            table("key_pos_embeddings"),
            table("key_pos_bias"),
            stacked("attn", "output", "weight"),
            stacked("attn", "output", "bias"),
            stacked("norm_ff", "weight"),
            stacked("norm_ff", "bias"),
            stacked("feed_forward", "layer1", "weight") if standard else none,
            stacked("feed_forward", "layer1", "bias") if standard else none,
            stacked("feed_forward", "layer2", "weight") if standard else none,
            stacked("feed_forward", "layer2", "bias") if standard else none,
            self.mixing(),
            key_value,
            key_value_bias,
            None if memory is None else memory.weight,
            None if memory is None else memory.bias,
            self.norm.weight,
            self.norm.bias,
        )

    # A layer may be given other probabilities than its neighbours; so each draws its own.
    def _noise(self, x: Tensor, span: int) -> Noise | None:
        layers: list[Any] = list(self.layers)
        if not all(layer.is_standard for layer in layers):
            return None
        probabilities = [
            (layer.attn.dropout.p, layer.dropout.p, layer.feed_forward.dropout.p, layer.dropout.p)
            for layer in layers
        ]
        if not any(map(any, probabilities)):
            return None
        length, batch = x.shape[:2]
        hidden = layers[0].feed_forward.layer1.out_features
        shapes = ((self.heads, batch, span), (batch, self.d_model), (batch, hidden), (batch, self.d_model))
        draws = (
            torch.stack([F.dropout(x.new_ones(length, *shape), p) for p in column])
            for column, shape in zip(zip(*probabilities, strict=True), shapes, strict=True)
        )
        return Noise(*draws)


class FeedbackTransformer(_Backbone):
    r"""The original: every layer projects the memory to keys and values of its own.

    `window` limits attention to that many memories. `combine` says how layers make a memory: "softmax" is a
    learned mixture, "mean" an even one, "top" the last layer alone. `norm_memory` normalises it.

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
    ):
        super().__init__(layer, n_layers, window, combine, norm_memory)
        if layer.attn.key is None:
            raise ValueError(
                "the original projects keys and values in every layer; build FeedbackAttention with "
                "is_kv_precomputed=False, or use FeedbackTransformerKV"
            )

    def key_value(self) -> tuple[Tensor, Tensor]:
        r"""Give the projections of all layers."""
        layers: list[Any] = list(self.layers)
        pairs = [(layer.attn.key.linear, layer.attn.value.linear) for layer in layers]
        weights = torch.stack([torch.cat([key.weight, value.weight]) for key, value in pairs])
        biases = torch.stack([torch.cat([torch.zeros_like(v.bias), v.bias]) for _, v in pairs])
        return weights, biases


class FeedbackTransformerKV(_Backbone):
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
    ):
        if (d_model, heads) != (layer.d_model, layer.attn.heads):
            raise ValueError(
                f"d_model={d_model}, heads={heads} differ from the layer's d_model={layer.d_model}, "
                f"heads={layer.attn.heads}"
            )
        if layer.attn.key is not None:
            raise ValueError("shared keys and values: build FeedbackAttention with is_kv_precomputed=True")
        super().__init__(layer, n_layers, window, combine, norm_memory)
        self.key = Heads(d_model, heads, bias=False)
        self.value = Heads(d_model, heads, bias=False)

    def key_value(self) -> tuple[Tensor, Tensor]:
        r"""Give the one pair of projections; neither has a bias."""
        weights = torch.cat([self.key.linear.weight, self.value.linear.weight])[None]
        return weights, torch.zeros_like(weights[:, :, 0])


def _allowed(keys: Tensor | None, dense: Tensor | None) -> Tensor | None:
    if keys is None:
        return dense
    return keys[None] if dense is None else keys[None] & dense


def _joined(real: Tensor | None, allowed: Tensor | None, carried: int, x: Tensor) -> Tensor | None:
    if real is None and allowed is None:
        return None
    length, batch = x.shape[:2]
    rows = 1 if allowed is None else allowed.shape[0]
    yes = torch.ones(1, 1, 1, dtype=torch.bool, device=x.device)
    before = (yes if real is None else real[None]).expand(rows, carried, batch)
    now = (yes if allowed is None else allowed).expand(rows, length, batch)
    return torch.cat([before, now], dim=1)


def _reach_for(module: nn.Module, path: tuple[str, ...]) -> Tensor:
    for name in path:
        module = getattr(module, name)
    return module  # type: ignore[return-value]

r"""What the two Feedback Transformers share: all but where keys and values come from.

A backbone gathers parameters, checks masks and keeps the memory between calls. A whole sequence goes to
`feedback_transformer` in one call; a position at a time goes through the modules, or the compiled step.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from postil.masks import MaskLike, as_mask, check_mask, hide_padding
from postil.mixer import check_sizes
from postil.mixers.feedback import kernel
from postil.mixers.feedback.attention import reachable
from postil.mixers.feedback.layer import FeedbackTransformerLayer
from postil.mixers.feedback.memory import FeedbackState, Stack
from postil.mixers.feedback.operation import feedback_transformer
from postil.mixers.feedback.recurrence import FeedbackWeights, Memory, Noise
from postil.transformer.layers import clone_layers

__all__ = ["FeedbackBackbone"]


class FeedbackBackbone(nn.Module):
    r"""What both models share: all but where keys and values come from."""

    def __init__(
        self,
        layer: FeedbackTransformerLayer,
        n_layers: int,
        window: int | None,
        combine: str,
        norm_memory: bool,
        recompute: bool,
    ):
        super().__init__()
        check_sizes(n_layers=n_layers, window=1 if window is None else window)
        if combine not in ("softmax", "mean", "top"):
            raise ValueError(f"combine={combine!r} is not known; there are softmax, mean, top")
        self.d_model = layer.d_model
        self.heads = layer.attn.heads
        self.window = window
        self.combine = combine
        self.recompute = recompute
        self.layers = clone_layers(layer, n_layers)
        self.norm = nn.LayerNorm(layer.d_model)
        self.weights = nn.Parameter(torch.ones(n_layers + 1)) if combine == "softmax" else None
        self.norm_memory = nn.LayerNorm(layer.d_model) if norm_memory else None

    # ## Where keys and values come from
    def project(self, m: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "B G H E"], Float[Tensor, "B G H E"]]:
        r"""Give the keys and values of one memory vector."""
        raise NotImplementedError

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

    def projections(self) -> list[list[Tensor | None]]:
        r"""Give the parameters of `project`: for each group the weights of keys and values, and a bias."""
        raise NotImplementedError

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

    # Which form computes a model follows from its layers. Where that costs hours, training says so.
    def remarks(self) -> list[str]:
        r"""Say what a person should know before training this model."""
        if self._is_standard:
            return []
        return [
            "this model is computed position by position and layer by layer, which is many times slower; the "
            "fast forms know feed-forward networks of ReLU with biases (--model.activation relu)"
        ]

    @property
    def _is_standard(self) -> bool:
        return all(layer.is_standard for layer in self.layers)

    def _compute(self, *operands: object) -> tuple[Tensor, Memory]:
        if self._is_standard:
            return feedback_transformer(*operands, recompute=self.recompute)  # type: ignore[arg-type]
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
            h, k, v = self._position(h, read, may)
            keys.append(now, k)
            values.append(now, v)
            outputs.append(h)
        y = torch.stack(outputs) if outputs else x
        empty = x.new_empty(0, x.shape[1], w.key_value.shape[0], self.heads, self.d_model // self.heads)
        return self.norm(y), (keys.get(), values.get()) if carried + len(outputs) else (empty, empty)

    def _position(self, h: Tensor, read: Memory | None, may: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        outputs = [h]
        for index, layer in enumerate(self.layers):
            k, v = (None, None) if read is None else (m[:, :, index % m.shape[2]] for m in read)
            h = layer(x=h, key=k, value=v, mask=may)
            outputs.append(h)
        m = (torch.stack(outputs) * self.mixing()[:, None, None]).sum(dim=0)
        if self.norm_memory is not None:
            m = self.norm_memory(m)
        return h, *self.project(m)

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
        found = self._plan(x_t, state)
        if found is not None:
            after = state.grown(self.window)
            return kernel.step(found, x_t, after, state.stop - state.start, self.mixing()), after
        keys, values, may = state.memory
        h, k, v = self._position(x_t, (keys, values), may)
        return self.norm(h), state.append(k, v, self.window)

    # Many rows would each read all weights again; from eight on, the library's products are the better way.
    def _plan(self, x_t: Tensor, state: FeedbackState) -> kernel.Plan | None:
        suits = (
            not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and x_t.is_cpu
            and x_t.dtype == torch.float32
            and x_t.shape == (state.keys.shape[1], self.d_model)
            and 0 < x_t.shape[0] < 8
            and kernel.reads(state)
        )
        return kernel.plan(self, self._step_operands) if suits else None

    def _step_operands(self) -> kernel.Operands | None:
        if not all(layer.is_standard and not layer.drops for layer in self._layers):
            return None
        layers = [
            [
                *(layer.norm_self_attn.weight, layer.norm_self_attn.bias, layer.attn.query.linear.weight),
                *(layer.attn.query_pos_bias, layer.attn.key_pos_embeddings, layer.attn.key_pos_bias),
                *(layer.attn.output.weight, layer.attn.output.bias),
                *(layer.norm_ff.weight, layer.norm_ff.bias),
                *(layer.feed_forward.layer1.weight, layer.feed_forward.layer1.bias),
                *(layer.feed_forward.layer2.weight, layer.feed_forward.layer2.bias),
            ]
            for layer in self._layers
        ]
        norms = {"final_gain": self.norm.weight, "final_shift": self.norm.bias}
        if self.norm_memory is not None:
            norms |= {"memory_gain": self.norm_memory.weight, "memory_shift": self.norm_memory.bias}
        return kernel.Operands(layers, self.projections(), norms)

    @property
    def _layers(self) -> list[Any]:
        return list(self.layers)

    # ## The operands
    def _gather(self, reach: int) -> FeedbackWeights:
        def stacked(*path: str) -> Tensor:
            return torch.stack([_reach_for(layer, path) for layer in self.layers])

        def table(name: str) -> Tensor:
            return torch.stack([reachable(getattr(layer.attn, name), reach) for layer in self.layers])

        key_value, key_value_bias = self.key_value()
        memory = self.norm_memory
        standard = self._is_standard
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
        if not self._is_standard:
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

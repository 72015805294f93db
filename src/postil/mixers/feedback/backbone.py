r"""What the two Feedback Transformers share: all but where keys and values come from.

A backbone gathers parameters, checks masks and keeps the memory between calls. A whole sequence goes to
`feedback_transformer` in one call; a position at a time goes to `decoding.step`, or to its compiled form.
Both read parameters and leave the modules aside. Where a part is not what they take it for, the modules
compute.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from postil.masks import MaskLike, as_mask, check_mask, hide_padding
from postil.mixer import check_sizes
from postil.mixers.feedback import decoding, kernel
from postil.mixers.feedback.attention import reachable
from postil.mixers.feedback.layer import FeedbackTransformerLayer, LayerWeights, runs_linear, runs_norm
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

    def maps(self) -> list[tuple[Any, Any]]:
        r"""Give the linear maps of `project`, to keys and to values, one pair where all layers share it."""
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
        layers, like = len(self.layers), next(self.parameters()).detach()
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
        return self._compute(x, mask)[0]

    def operands(
        self, x: Float[Tensor, "T B D"], mask: MaskLike = None, state: FeedbackState | None = None
    ) -> tuple[Tensor, FeedbackWeights, Memory | None, Tensor | None, int | None, Noise | None]:
        r"""Check, hide padding, gather: the arguments of `feedback_transformer` and its reference.

        Only where every part of every layer is of the usual kind; others have no such weights.
        """
        x, memory, allowed, window = self._prepared(x, mask, state)
        span = x.shape[0] + (0 if memory is None else memory[0].shape[0])
        reach = max(1, span - 1 if window is None else min(window, span - 1))
        noise = self._noise(x, span) if self.training else None
        return x, self._gather(reach), memory, allowed, window, noise

    def _prepared(
        self, x: Tensor, mask: MaskLike, state: FeedbackState | None
    ) -> tuple[Tensor, Memory | None, Tensor | None, int | None]:
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
        return hide_padding(x, mask), memory, allowed, window

    # Which form computes a model follows from its layers. Where that costs hours, training says so.
    def remarks(self) -> list[str]:
        r"""Say what a person should know before training this model."""
        if self._is_standard:
            return []
        return [
            "this model is computed position by position and layer by layer, which is many times slower; the "
            "fast forms know feed-forward networks of ReLU with biases (--model.activation relu)"
        ]

    # A hook below the model wants to see its module run, so the modules run.
    @property
    def _is_standard(self) -> bool:
        if any(decoding.hooks_below(self)) or not all(layer.is_standard for layer in self._layers):
            return False
        shapes = {
            (layer.attn.heads, layer.feed_forward.layer1.out_features, len(layer.attn.key_pos_bias))
            for layer in self._layers
        }
        norms = [self.norm] if self.norm_memory is None else [self.norm, self.norm_memory]
        return (
            len(shapes) == 1
            and all(runs_norm(norm) for norm in norms)
            and all(runs_linear(k, False) and runs_linear(v, v.bias is not None) for k, v in self.maps())
        )

    def _compute(
        self, x: Tensor, mask: MaskLike, state: FeedbackState | None = None
    ) -> tuple[Tensor, Memory]:
        if self._is_standard:
            return feedback_transformer(*self.operands(x, mask, state), recompute=self.recompute)
        return self._walk(*self._prepared(x, mask, state))

    # Layers of other kinds are walked through, module by module, and autograd records every step.
    def _walk(
        self,
        x: Tensor,
        memory: Memory | None,
        allowed: Tensor | None,
        window: int | None,
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
        y = self.norm(torch.stack(outputs) if outputs else x)
        if carried + len(outputs) > 0:
            return y, (keys.get(), values.get())
        k, v = self.project(x.new_zeros(x.shape[1:]))
        return y, (k[None][:0], v[None][:0])

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
        y, (keys, values) = self._compute(x, mask, state)
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
            count, after = state.stop - state.start, state.grown(self.window)
            compute = kernel.step if kernel.steps(found, x_t, after) else decoding.step
            return compute(found, x_t, after, count, self.mixing()), after
        keys, values, may = state.memory
        h, k, v = self._position(x_t, (keys, values), may)
        return self.norm(h), state.append(k, v, self.window)

    # Whatever records gradients, drops out or is traced goes through the modules, and so does what they
    # reject.
    def _plan(self, x_t: Tensor, state: FeedbackState) -> decoding.Plan | None:
        suits = (
            not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and state.stop > state.start
            and x_t.shape == (state.keys.shape[1], self.d_model)
            and x_t.dtype == state.keys.dtype
            and x_t.device == state.keys.device
        )
        return decoding.plan(self, self._step_operands) if suits else None

    def _step_operands(self) -> decoding.Operands | None:
        if not self._is_standard or any(layer.drops for layer in self._layers):
            return None
        memory = self.norm_memory
        return decoding.Operands(
            [layer.weights for layer in self._layers],
            [decoding.Projection(key.weight, value.weight, value.bias) for key, value in self.maps()],
            None if memory is None else (memory.weight, memory.bias),
            (self.norm.weight, self.norm.bias),
        )

    @property
    def _layers(self) -> list[Any]:
        return list(self.layers)

    # ## The operands
    def _gather(self, reach: int) -> FeedbackWeights:
        rows = [
            w._replace(
                key_pos_embeddings=reachable(w.key_pos_embeddings, reach),
                key_pos_bias=reachable(w.key_pos_bias, reach),
            )
            for w in (layer.weights for layer in self._layers)
        ]
        weights, biases = zip(*(_as_one(key, value) for key, value in self.maps()), strict=True)
        memory = self.norm_memory
        return FeedbackWeights(
            *LayerWeights(*(torch.stack(column) for column in zip(*rows, strict=True))),
            mixing=self.mixing(),
            key_value=torch.stack(weights),
            key_value_bias=torch.stack(biases),
            memory_gain=None if memory is None else memory.weight,
            memory_shift=None if memory is None else memory.bias,
            final_gain=self.norm.weight,
            final_shift=self.norm.bias,
        )

    # A layer may be given other probabilities than its neighbours; so each draws its own.
    def _noise(self, x: Tensor, span: int) -> Noise | None:
        layers = self._layers
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


def _as_one(key: nn.Linear, value: nn.Linear) -> tuple[Tensor, Tensor]:
    none = torch.zeros_like(value.weight[:, 0])
    bias = none if value.bias is None else value.bias
    return torch.cat([key.weight, value.weight]), torch.cat([none, bias])


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

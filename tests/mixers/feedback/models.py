"""Small Feedback Transformers for the tests."""

import torch
from torch import Tensor, nn

from postil.mixers.feedback import (
    FeedbackAttention,
    FeedbackTransformer,
    FeedbackTransformerKV,
    FeedbackTransformerLayer,
)
from postil.transformer.feed_forward import FeedForward

D, H, F, L = 8, 2, 12, 2


def build_layer(
    shared: bool, dropout: float = 0.0, positions: int = 64, feed_forward: nn.Module | None = None
) -> FeedbackTransformerLayer:
    attn = FeedbackAttention(H, D, dropout, is_kv_precomputed=shared, positions=positions)
    feed_forward = feed_forward or FeedForward(D, F, dropout)
    return FeedbackTransformerLayer(d_model=D, attn=attn, feed_forward=feed_forward, dropout_prob=dropout)


def build(
    shared: bool = True,
    *,
    dtype: torch.dtype = torch.float64,
    layers: int = L,
    dropout: float = 0.0,
    positions: int = 64,
    feed_forward: nn.Module | None = None,
    **options: object,
) -> FeedbackTransformer | FeedbackTransformerKV:
    layer = build_layer(shared, dropout, positions, feed_forward)
    if shared:
        model = FeedbackTransformerKV(layer, layers, D, H, **options)
    else:
        model = FeedbackTransformer(layer, layers, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def sequence(length: int = 12, batch: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(length, batch, D, dtype=dtype)


def assert_steps(
    model: nn.Module, x: Tensor, expected: Tensor, state: object, start: int, tolerance: float
) -> None:
    """Step from `start` to the end; every step must give its row of `expected`."""
    for t in range(start, len(x)):
        y, state = model.step(x[t], state)
        torch.testing.assert_close(y, expected[t], rtol=tolerance, atol=tolerance)


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return list(torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True, retain_graph=True))

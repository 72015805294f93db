"""The members of the family under one face: small operands, both forms, a module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from postil.masks import Mask
from postil.mixers.aft import (
    AFTConv,
    AFTConv2d,
    AFTFull,
    AFTLocal,
    AFTSimple,
    aft_conv,
    aft_conv2d,
    aft_conv2d_reference,
    aft_conv_reference,
    aft_full,
    aft_full_reference,
    aft_local,
    aft_local_reference,
    aft_simple,
    aft_simple_reference,
)
from postil.mixers.aft.layer import AFTLayer

WIDTH = 4


@dataclass(frozen=True)
class Member:
    """`biases(T, S, offset)` draws what stands between the values and the mask in both forms' signatures."""

    fast: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    module: Callable[[int, int], AFTLayer]
    biases: Callable[[int, int, int], tuple[Any, ...]]
    keys: int = 6

    def operands(self, t: int, s: int, batch: int, offset: int = 0, dtype: Any = torch.float64) -> list[Any]:
        """Draw leaf tensors `q, k, v` and the biases; the mask is left to the caller."""
        tensors = [torch.randn(t, batch, 6), torch.randn(s, batch, self.keys), torch.randn(s, batch, 6)]
        drawn = [*tensors, *self.biases(t, s, offset)]
        return [x.to(dtype).requires_grad_() if isinstance(x, Tensor) else x for x in drawn]


MEMBERS = {
    "full": Member(
        aft_full, aft_full_reference, lambda d, n: AFTFull(d, n), lambda t, s, o: (torch.randn(t, s),)
    ),
    "simple": Member(aft_simple, aft_simple_reference, lambda d, n: AFTSimple(d), lambda t, s, o: ()),
    "local": Member(
        aft_local,
        aft_local_reference,
        lambda d, n: AFTLocal(d, n, 5),
        lambda t, s, o: (torch.randn(t + o, 9),),
    ),
    "conv": Member(
        aft_conv,
        aft_conv_reference,
        lambda d, n: AFTConv(2, d, 5),
        lambda t, s, o: (torch.randn(2, 5), 4),
        keys=2,
    ),
    "conv, centred": Member(
        aft_conv,
        aft_conv_reference,
        lambda d, n: AFTConv(2, d, 5, centred=True),
        lambda t, s, o: (torch.randn(2, 5), 2),
        keys=2,
    ),
    "conv2d": Member(
        aft_conv2d,
        aft_conv2d_reference,
        lambda d, n: AFTConv2d(2, d, WIDTH, 3),
        lambda t, s, o: (torch.randn(2, 3, 3), WIDTH),
        keys=2,
    ),
}


@pytest.fixture(params=MEMBERS)
def member(request: pytest.FixtureRequest) -> Member:
    return MEMBERS[request.param]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def perturbed(module: AFTLayer, size: float = 0.3) -> AFTLayer:
    """Move the biases that start at zero, or no test would see them."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module


CAUSAL = Mask(causal=True)

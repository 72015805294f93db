r"""How fast a training is, in proportion to what the machine can do.

Tokens a second compare runs of one model on one machine. To compare others one divides by what the model
needs and the machine offers. A token costs each weight of a matrix one multiplication and one addition
forward and twice that backward:

$$\text{utilisation} = \frac{6 N \cdot \text{tokens a second}}{\text{operations a second at best}} \tag{1}$$

What mixing adds (attention's scores, say) is not counted, and what activation checkpointing computes twice
is not either: it is a lower bound, the same for all mixers. The best is measured, not read from a
data sheet: it is the speed at which this device multiplies two matrices that fit its caches.
"""

from __future__ import annotations

import time

import torch
from torch import nn

__all__ = ["flops_per_token", "matrix_speed"]


def flops_per_token(model: nn.Module) -> int:
    r"""Operations that training needs for a token: six for each weight of a linear layer, Eq. (1).

    Source: [kaplan2020], Section 2.1.
    """
    return 6 * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


# A few milliseconds on a CPU. The first product wakes threads and warms caches, and does not count. Nothing
# is drawn from a random generator.
def matrix_speed(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    r"""Measure operations per second of a matrix product on `device`: the best of five."""
    n = 4096 if device.type == "cuda" else 512
    x = torch.full((n, n), 0.5, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        began = _now(device)
        torch.mm(x, x)
        best = min(best, _now(device) - began)
    return 2 * n**3 / best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

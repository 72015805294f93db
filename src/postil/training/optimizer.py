r"""AdamW, with decay only where it means something.

Weight decay pulls a parameter towards zero. For a matrix zero means "no opinion"; for the gain of a norm it
means "switch the layer off", and a bias has no scale to keep small. So matrices decay and vectors do not.
"""

from __future__ import annotations

import torch
from torch import nn

from postil.training.settings import OptimizerSettings

__all__ = ["make_optimizer", "set_learning_rate"]


# PyTorch multiplies the decay by the learning rate of the group. A schedule that leaves the group's rate at
# 1 and scales the update itself would decay weights by the full factor each time; here the group always
# carries the rate that is really used.
def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    r"""Build AdamW with two groups: matrices and tables decay, vectors do not.

    Source: [loshchilov2019], Algorithm 2.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        # One kernel for all parameters of a group instead of one each: the same update, fewer passes.
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    r"""Give all groups the rate of the coming update."""
    for group in optimizer.param_groups:
        group["lr"] = lr

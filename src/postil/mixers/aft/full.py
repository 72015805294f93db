r"""AFT-full."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from postil.masks import Mask, dense_mask

__all__ = ["aft_full_reference"]


def aft_full_reference(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B D"],
    v: Float[Tensor, "S B D"],
    bias: Float[Tensor, "T S"],
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""Equation (1)."""
    logits = k[None] + bias[:, :, None, None]
    allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device)[..., None]
    empty = ~allowed.any(dim=1, keepdim=True)
    weights = logits.masked_fill(~(allowed | empty), -torch.inf).softmax(dim=1).masked_fill(empty, 0.0)
    return torch.sigmoid(q) * torch.einsum("tsbd,sbd->tbd", weights, v)

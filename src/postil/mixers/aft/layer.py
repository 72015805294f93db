r"""What all members of the family share: four linear layers around a mean.

$$Q = X_q W_Q, \qquad K = X_k W_K, \qquad V = X_v W_V, \qquad \mathrm{output} = Y\, W_O$$

Only the mean in the middle differs. A member names it by giving its arguments, `operands`, and the function
that takes them, `mix`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from postil.masks import Mask, MaskLike, as_mask, check_mask, hide_padding
from postil.mixer import CausalMixer, check_sizes

__all__ = ["AFTLayer", "check_length", "hide_keys"]


class AFTLayer(CausalMixer):
    r"""A member of the family: projections of query, key and value, a gated mean, a projection of the result.

    Source: [zhai2021], Section 3.

    Raises:
        ValueError: a size is not a positive whole number.
    """

    def __init__(self, d_model: int, bias: bool = True, *, keys: int | None = None):
        super().__init__()
        check_sizes(d_model=d_model)
        self.d_model = d_model
        self.query = nn.Linear(d_model, d_model, bias=bias)
        self.key = nn.Linear(d_model, d_model if keys is None else keys, bias=bias)
        self.value = nn.Linear(d_model, d_model, bias=bias)
        self.output = nn.Linear(d_model, d_model)

    def reset_parameters(self) -> None:
        r"""Draw the four projections anew, by the rule of `torch.nn.Linear`."""
        for linear in (self.query, self.key, self.value, self.output):
            linear.reset_parameters()

    @abstractmethod
    def operands(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: MaskLike = None
    ) -> tuple[Any, ...]:
        r"""Check, hide padding, project: the arguments of this member's equation, in either of its forms."""

    @abstractmethod
    def mix(self, *operands: Any) -> Float[Tensor, "T B D"]:
        r"""Compute this member's equation from its `operands`, in its fast form."""

    def forward(
        self,
        *,
        query: Float[Tensor, "T B D"],
        key: Float[Tensor, "S B D"],
        value: Float[Tensor, "S B D"],
        mask: MaskLike = None,
    ) -> Float[Tensor, "T B D"]:
        r"""Mix and project; `mask` as for every mixer.

        Raises:
            ValueError: lengths, batches or widths do not fit together, or the mask does not fit them.
            TypeError: the mask is neither boolean nor integer.
        """
        return self.output(self.mix(*self.operands(query=query, key=key, value=value, mask=mask)))

    def project(
        self, query: Tensor, key: Tensor, value: Tensor, mask: MaskLike
    ) -> tuple[Tensor, Tensor, Tensor, Mask]:
        r"""Check the inputs, hide padding, apply the three projections; return also the structured mask."""
        self._check(query, key, value)
        mask = as_mask(mask)
        check_mask(mask, query.shape[0], key.shape[0], key.shape[1])
        # One tensor given three times is copied once. Its padded rows are queries too, and hidden with it.
        hidden = hide_padding(key, mask)
        value = hidden if value is key else hide_padding(value, mask)
        query = hidden if query is key else query
        return self.query(query), self.key(hidden), self.value(value), mask

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            raise ValueError(
                f"key {list(key.shape)} and value {list(value.shape)} must have the same shape [S, B, D]"
            )
        if query.dim() != 3 or query.shape[1:] != key.shape[1:] or query.shape[-1] != self.d_model:
            raise ValueError(
                f"query {list(query.shape)} and key {list(key.shape)} must agree in batch and in width "
                f"d_model={self.d_model}; only their lengths may differ"
            )


# A table of biases knows only the positions it was made for.
def check_length(length: int, seq_len: int, what: str = "query") -> None:
    r"""Check that positions `0` to `length - 1` exist in a table of `seq_len` rows.

    Raises:
        ValueError: naming both lengths.
    """
    if length > seq_len:
        raise ValueError(
            f"{what} reaches position {length}, but the position biases were made for seq_len={seq_len}; "
            f"build the module with seq_len={length} or more, or shorten the input"
        )


def hide_keys(k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    r"""Give padded keys the weight $e^{-\infty} = 0$ and the value 0."""
    if mask.keys is None:
        return k, v
    padded = ~mask.keys[:, :, None]
    return k.masked_fill(padded, -torch.inf), v.masked_fill(padded, 0.0)

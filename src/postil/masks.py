r"""Masks: who may read whom.

A sequence layer computes each output position from some input positions. A mask says which. Everywhere in
this library **true means "may read"**; the opposite convention exists elsewhere, and mixing the two makes a
model that sees only the future.

The alphabet of shapes, used on every page:

| letter | meaning |
| --- | --- |
| `S` | positions read (keys and values) |
| `T` | positions computed (queries) |
| `B` | batch |
| `D` | model width, `d_model` |
| `H`, `E` | heads, and the width of one head, $E = D / H$ |
| `L` | layers |

Sequences are time-major, `[T, B, D]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

__all__ = ["Mask", "MaskLike", "as_mask", "check_mask", "dense_mask", "hide_padding"]


@dataclass(frozen=True)
class Mask:
    r"""A structured mask: a conjunction of simple rules, each optional.

    Query `i` may read key `j` of batch row `b` exactly when *all* given rules agree:

    * `causal`: $j \le i + \mathrm{offset}$, where `offset` counts the keys that precede the first query;
    * `window`: $|i + \mathrm{offset} - j| < \mathrm{window}$;
    * `keys` `[S, B]`: key `j` of row `b` is real, not padding;
    * `dense` `[T or 1, S, B or 1]`: an arbitrary rule, written out.

    Fast forms read the structure; only `dense` costs $T \times S$ memory.

    Raises:
        TypeError: a tensor is neither boolean nor integer.
        ValueError: a tensor has the wrong number of axes, or a number is out of range.
    """

    causal: bool = False
    keys: Tensor | None = None
    dense: Tensor | None = None
    window: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: a window of at least 1 lets a position read itself")
        if self.offset < 0:
            raise ValueError(
                f"offset={self.offset} counts keys before the first query, so it is not negative"
            )
        if self.keys is not None:
            object.__setattr__(self, "keys", _as_bool(self.keys, axes=2, name="keys"))
        if self.dense is not None:
            object.__setattr__(self, "dense", _as_bool(self.dense, axes=3, name="mask"))

    # The length of each row is how most data sets describe padding.
    @staticmethod
    def padding(lengths: Int[Tensor, "B"], seq_len: int, *, causal: bool = False) -> Mask:
        r"""Mask of a batch padded on the right: row `b` is real up to `lengths[b]`.

        Raises:
            ValueError: a length is negative or exceeds `seq_len`.
        """
        if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= seq_len:
            raise ValueError(f"lengths {lengths.tolist()} must lie between 0 and seq_len={seq_len}")
        positions = torch.arange(seq_len, device=lengths.device)
        return Mask(causal=causal, keys=positions[:, None] < lengths[None, :])

    @property
    def is_full(self) -> bool:
        r"""True when every query may read every key."""
        return not self.causal and self.window is None and self.keys is None and self.dense is None

    # A decoding step is one query behind all keys: there the causal rule hides nothing, and a kernel that is
    # told so need not build a mask.
    def reduced(self, queries: int, keys: int) -> Mask:
        r"""Drop the rules that hide nothing between `queries` and `keys` positions."""
        causal = self.causal and self.offset < keys - 1
        reach = max(self.offset + queries - 1, keys - 1 - self.offset)
        window = self.window if self.window is not None and self.window <= reach else None
        offset = self.offset if causal or window is not None else 0
        return replace(self, causal=causal, window=window, offset=offset)

    def cut(self, queries: slice, keys: slice) -> Mask:
        r"""Give the mask of a rectangle: these queries reading these keys, as plain slices.

        Raises:
            ValueError: the first key lies after the first query.
        """
        dense = self.dense
        if dense is not None:
            dense = dense[queries if dense.shape[0] > 1 else slice(None), keys]
        return Mask(
            causal=self.causal,
            keys=None if self.keys is None else self.keys[keys],
            dense=dense,
            window=self.window,
            offset=self.offset + queries.start - keys.start,
        )


MaskLike = Mask | Tensor | None


def as_mask(mask: MaskLike) -> Mask:
    r"""Give any accepted mask its structured form: `None` hides nothing, a tensor is dense."""
    if mask is None:
        return Mask()
    return mask if isinstance(mask, Mask) else Mask(dense=mask)


# The general form writes the rules out. It is what references use, and what a fast form falls back on for
# rules it has no structure for.
def dense_mask(
    mask: Mask, queries: int, keys: int, device: torch.device | None = None
) -> Bool[Tensor, "T S #B"]:
    r"""Write a structured mask out as `[T, S, B or 1]`, true where query `i` may read key `j`.

    Cost: $T S$ booleans, times the batch if `keys` or `dense` differ by row.

    Raises:
        ValueError: the mask's own tensors do not fit `queries` and `keys`.
    """
    check_mask(mask, queries, keys)
    lag = (
        torch.arange(queries, device=device)[:, None]
        + mask.offset
        - torch.arange(keys, device=device)[None, :]
    )
    allowed = torch.ones_like(lag, dtype=torch.bool)
    if mask.causal:
        allowed = allowed & (lag >= 0)
    if mask.window is not None:
        allowed = allowed & (lag.abs() < mask.window)
    allowed = allowed[:, :, None]
    if mask.keys is not None:
        allowed = allowed & mask.keys[None]
    if mask.dense is not None:
        allowed = allowed & mask.dense
    return allowed


def check_mask(mask: Mask, queries: int, keys: int, batch: int | None = None) -> None:
    r"""Check a mask's tensors against the sequence they are for.

    Raises:
        ValueError: naming the axis, its size and the sizes that fit.
    """
    if mask.keys is not None:
        _check_axis("keys", mask.keys, 0, (keys,), "S")
        if batch is not None:
            _check_axis("keys", mask.keys, 1, (batch,), "B")
    if mask.dense is not None:
        _check_axis("mask", mask.dense, 0, (1, queries), "T")
        _check_axis("mask", mask.dense, 1, (keys,), "S")
        if batch is not None:
            _check_axis("mask", mask.dense, 2, (1, batch), "B")


# Zero times NaN is NaN. A padded position may hold anything, so it is overwritten before it enters any
# product; a weight of zero afterwards would come too late, for the output and for the gradients.
def hide_padding(x: Tensor, mask: Mask) -> Tensor:
    r"""Replace padded positions of `x` `[S, B, D]` by zeros; without key padding, return `x` itself."""
    return x if mask.keys is None else x.masked_fill(~mask.keys[:, :, None], 0.0)


def _as_bool(mask: Tensor, axes: int, name: str) -> Tensor:
    # A float mask of zeros and ones is ambiguous: some libraries add it to the scores and so hide nothing.
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"{name} has dtype {mask.dtype}; masks are boolean or integer, true (non-zero) where a query may "
            f"read a key. Convert a 0/1 matrix with `mask.bool()`, an additive 0/-inf one with `mask == 0`."
        )
    if mask.dim() != axes:
        shape = "[T or 1, S, B or 1]" if axes == 3 else "[S, B]"
        raise ValueError(f"{name} has shape {list(mask.shape)}; expected {axes} axes, {shape}")
    return mask if mask.dtype == torch.bool else mask != 0


def _check_axis(name: str, mask: Tensor, axis: int, sizes: tuple[int, ...], letter: str) -> None:
    if mask.shape[axis] not in sizes:
        fits = " or ".join(str(size) for size in dict.fromkeys(sizes))
        raise ValueError(f"{name} {list(mask.shape)}: axis {axis} ({letter}) must be {fits}")

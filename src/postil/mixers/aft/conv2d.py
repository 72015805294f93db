r"""AFT-conv for images: biases that depend on the distance in two dimensions.

A picture read line by line is a sequence, but its neighbours above and below are a whole line away. AFT-conv
extends to it by one change: the kernel becomes a small picture itself,

$$w^h_{t,s} = w^h\big[\, y_s - y_t,\; x_s - x_t \,\big], \qquad t = \mathrm{width} \cdot y_t + x_t \tag{1}$$

zero outside of the kernel, where the key still counts. The mean over all pixels stays the one of `conv`.

Sequences are pictures in raster order, `[T, B, D]` with $T = \mathrm{height} \cdot \mathrm{width}$; a causal
mask makes a model that draws them pixel by pixel.

:paper: zhai2021
:terms:
    w: kernel
    t: t
    s: s
    \mathrm{width}: width
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from postil.masks import Mask, MaskLike, dense_mask
from postil.mixer import check_sizes
from postil.mixers.aft.conv import KernelLayer, gated_mean_reference
from postil.mixers.aft.gated_mean import Reach, gated_mean
from postil.mixers.aft.layer import hide_keys
from postil.mixers.aft.log_space import log_space_mean
from postil.mixers.aft.sums import WindowState

__all__ = ["AFTConv2d", "aft_conv2d", "aft_conv2d_reference"]


# ## The equation, literally
def image_bias(
    kernel: Float[Tensor, "H n n"], width: int, t: Int[Tensor, "T"], s: Int[Tensor, "S"]
) -> Float[Tensor, "H T S"]:
    r"""Write equation (1) out for queries at `t` and keys at `s`, both counted in raster order."""
    n = kernel.shape[1]
    rows = s.div(width, rounding_mode="floor") - t.div(width, rounding_mode="floor")[:, None] + n // 2
    columns = s % width - (t % width)[:, None] + n // 2
    inside = (rows >= 0) & (rows < n) & (columns >= 0) & (columns < n)
    return kernel[:, rows.clamp(0, n - 1), columns.clamp(0, n - 1)].where(inside, 0.0)


def _positions(q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[0], device=q.device) + mask.offset, torch.arange(k.shape[0], device=q.device)


def aft_conv2d_reference(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B H"],
    v: Float[Tensor, "S B D"],
    kernel: Float[Tensor, "H n n"],
    width: int,
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""The mean of `conv` with the biases of equation (1).

    Source: [zhai2021], Section 3.2. Cost: $T S B D$ time, $T S B H$ memory.
    """
    return gated_mean_reference(q, k, v, image_bias(kernel, width, *_positions(q, k, mask)), mask)


# ## The fast form
#
# Take one line of the picture as a block of queries. The lines around it that the kernel reaches are a block
# of neighbouring keys, and the biases between them are the same for every line. So this is the same near
# product and far sum as in one dimension, with another small matrix.
def aft_conv2d(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B H"],
    v: Float[Tensor, "S B D"],
    kernel: Float[Tensor, "H n n"],
    width: int,
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""Equation (1) as near products and far sums, one line of the picture at a time.

    With $C = \mathrm{width}$ a block meets the $\lfloor n/2 \rfloor$ lines before it, its own, and as many
    after it (causal: none); the matrix holds equation (1) for these, 0 included; all other lines are far.

    Cost: $T n\, \mathrm{width}\, B D$ time, $T B D$ memory. Other masks than causal ones and padding take the
    general form, and so do queries that do not start with a line.
    """
    k, v = hide_keys(k, v, mask)
    q4, v4 = (x.unflatten(-1, (k.shape[-1], -1)) for x in (q, v))
    if mask.dense is not None or mask.window is not None or mask.offset % width:
        bias = image_bias(kernel, width, *_positions(q, k, mask))
        mean = log_space_mean(k, v4, bias, dense_mask(mask, q.shape[0], k.shape[0], q.device))
        return torch.sigmoid(q) * mean.flatten(-2)
    return _lines(q4, k, v4, kernel, width, mask.offset, mask.causal).flatten(-2)


def _lines(q: Tensor, k: Tensor, v: Tensor, kernel: Tensor, width: int, start: int, causal: bool) -> Tensor:
    reach = width * (kernel.shape[1] // 2)
    t = torch.arange(reach, reach + width, device=q.device)
    s = torch.arange(reach + width + (0 if causal else reach), device=q.device)
    block = image_bias(kernel, width, t, s)
    if causal:
        block = block.masked_fill(s > t[:, None], -math.inf)
    return gated_mean(q, k, v, block[:, None], Reach(reach, 0 if causal else reach, start, causal, far=True))


# ## The module
class AFTConv2d(KernelLayer):
    r"""AFT-conv for pictures of a given width, with square kernels of odd size.

    Source: [zhai2021], Section 3.2. Deviation: as `KernelLayer`.

    Raises:
        ValueError: `d_model` is not a multiple of `heads`, the kernel is even, or a size is out of range.
    """

    def __init__(self, heads: int, d_model: int, width: int, kernel_size: int, bias: bool = True):
        check_sizes(width=width, kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} must be odd: a kernel has its centre at the query")
        super().__init__(heads, d_model, (kernel_size, kernel_size), bias)
        self.width = width

    def operands(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: MaskLike = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Mask]:
        r"""Check, hide padding, project: the arguments of `aft_conv2d` and `aft_conv2d_reference`."""
        q, k, v, rules = self.project(query, key, value, mask)
        return q, k, v, self.biases(), self.width, rules

    def mix(self, *operands: Any) -> Tensor:
        r"""Compute `aft_conv2d`."""
        return aft_conv2d(*operands)

    # The state keeps the lines within reach of any query of the current line, and that line up to the query:
    # as many keys at every position, so that a step is the same operation everywhere.
    @property
    def _near(self) -> int:
        return self.width * (self.kernel.shape[1] // 2) + self.width - 1

    # A chunk that starts within a line is led by as many empty queries, whose results are dropped, so that
    # blocks and lines fall together.
    def prefill(
        self, x: Float[Tensor, "T B D"], state: WindowState | None = None
    ) -> tuple[Float[Tensor, "T B D"], WindowState]:
        r"""Mix a chunk causally after what `state` remembers.

        Cost: $T n\, \mathrm{width}\, B D$ time; the state holds $\lfloor n/2 \rfloor + 1$ lines at most.
        """
        q, k, v, kernel, width, _ = self.operands(query=x, key=x, value=x, mask=Mask(causal=True))
        near, (q4, v4) = self._near, (x.unflatten(-1, (self.heads, -1)) for x in (q, v))
        state = WindowState.empty(k, v4, near) if state is None else state
        keys, values = state.prepend(k, v4)
        drawn = state.position % width
        led = torch.cat([q4.new_zeros(drawn, *q4.shape[1:]), q4])
        y = _lines(led, keys, values, kernel, width, near + 1 - drawn, causal=True)[drawn:]
        return self.output(y.flatten(-2)), state.extend(k, v4, near)

    def step(
        self, x_t: Float[Tensor, "B D"], state: WindowState | None = None
    ) -> tuple[Float[Tensor, "B D"], WindowState]:
        r"""Mix one position. Cost: $n\, \mathrm{width}\, B D$ time, however much is drawn."""
        near = self._near
        q, k, v = self.query(x_t), self.key(x_t), self.value(x_t).unflatten(-1, (self.heads, -1))
        state = WindowState.empty(k[None], v[None], near) if state is None else state
        s = torch.arange(near + 1, device=k.device) + (state.position - near)
        bias = image_bias(self.biases(), self.width, s[-1:], s)[:, 0].t()[:, None]
        mean = state.read(k, v, bias).flatten(-2)
        return self.output(torch.sigmoid(q) * mean.to(q.dtype)), state.extend(k[None], v[None], near)

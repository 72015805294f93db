r"""AFT-conv: biases that depend on distance only.

The biases of AFT-local, once learned, look much alike from row to row: what matters is how far two positions
are apart, and different channels want different profiles. So share the biases along time, and give each of
$H$ heads a profile, a *kernel*, of its own:

$$Y_t^h = \sigma(Q_t^h) \odot
\frac{\sum_s \exp(K_s^h + w^h_{s - t})\, V_s^h}{\sum_s \exp(K_s^h + w^h_{s - t})}, \qquad
w^h_{\tau} = 0 \ \text{ outside of the kernel} \tag{1}$$

A head has $E = D / H$ channels of queries and values, but a single channel of keys: whether position $s$ is
worth reading is one number for the head. As the kernel does not know the length of the sequence, neither does
the model: it reads sequences longer than any it has seen.

For images the same holds in two dimensions; see the page `conv2d`.

:paper: zhai2021
:terms:
    Q: q
    K: k
    V: v
    w: kernel
    H: heads
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from postil.masks import Mask, MaskLike, dense_mask
from postil.mixer import check_heads, check_sizes
from postil.mixers.aft.gated_mean import Reach, gated_mean
from postil.mixers.aft.layer import AFTLayer, hide_keys
from postil.mixers.aft.local import skew
from postil.mixers.aft.log_space import log_space_mean
from postil.mixers.aft.sums import WindowState

__all__ = ["AFTConv", "KernelLayer", "aft_conv", "aft_conv_reference", "gated_mean_reference"]

BLOCK = 16


# ## The equation, literally
#
# Column `centre` of a kernel belongs to the query itself. With the last column there, the kernel looks only
# back, as a convolution padded on the left does; with the middle one there, it looks both ways.
def conv_bias(
    kernel: Float[Tensor, "H n"], centre: int, queries: int, keys: int, offset: int = 0
) -> Float[Tensor, "H T S"]:
    r"""Write the kernels of equation (1) out as one matrix for each head, zero outside of the kernel."""
    n = kernel.shape[1]
    t = torch.arange(offset, offset + queries, device=kernel.device)[:, None]
    column = torch.arange(keys, device=kernel.device) - t + centre
    return kernel[:, column.clamp(0, n - 1)].where((column >= 0) & (column < n), 0.0)


def gated_mean_reference(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B H"],
    v: Float[Tensor, "S B D"],
    bias: Float[Tensor, "H T S"],
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""Give each head its biases and a single channel of keys, with all weights written out."""
    logits = k[None] + bias.permute(1, 2, 0)[:, :, None]
    allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device)[..., None]
    empty = ~allowed.any(dim=1, keepdim=True)
    weights = logits.masked_fill(~(allowed | empty), -torch.inf).softmax(dim=1).masked_fill(empty, 0.0)
    mean = torch.einsum("tsbh,sbhe->tbhe", weights, v.unflatten(-1, (k.shape[-1], -1)))
    return torch.sigmoid(q) * mean.flatten(-2)


def aft_conv_reference(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B H"],
    v: Float[Tensor, "S B D"],
    kernel: Float[Tensor, "H n"],
    centre: int,
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""Equation (1).

    Source: [zhai2021], Section 3.2. Cost: $T S B D$ time, $T S B H$ memory.
    """
    bias = conv_bias(kernel, centre, q.shape[0], k.shape[0], mask.offset)
    return gated_mean_reference(q, k, v, bias, mask)


# ## The fast form
#
# The paper convolves with $e^{w} - 1$ and adds the sum over everything. With a strongly negative bias that is
# a difference of nearly equal numbers, so near and far are kept apart here as in AFT-local. Blocks of queries
# then share one small matrix a head, a piece of a Toeplitz matrix, and need no convolution routine.
def aft_conv(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B H"],
    v: Float[Tensor, "S B D"],
    kernel: Float[Tensor, "H n"],
    centre: int,
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""Equation (1) as near products and far sums, with one matrix a head.

    It is `aft_local`, but row $r$ of every block is the same kernel shifted by $r$, and $e^{k - m}$ is one
    column for the $E$ columns $e^{k - m} v$ of its head.

    Cost: $T n B D$ time, $T B D$ memory. A mask that is dense or has a window takes the general form.
    """
    k, v = hide_keys(k, v, mask)
    q4, v4 = (x.unflatten(-1, (k.shape[-1], -1)) for x in (q, v))
    if mask.dense is not None or mask.window is not None:
        allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device)
        bias = conv_bias(kernel, centre, q.shape[0], k.shape[0], mask.offset)
        return torch.sigmoid(q) * log_space_mean(k, v4, bias, allowed).flatten(-2)
    if mask.causal:
        kernel = kernel[:, : centre + 1]
    n = kernel.shape[1]
    blocks = torch.stack([skew(head.expand(BLOCK, n), BLOCK, 0.0) for head in kernel])
    if mask.causal:
        r, c = (torch.arange(size, device=q.device) for size in blocks.shape[2:])
        blocks = blocks.masked_fill(c > r[:, None] + centre, -math.inf)
    reach = Reach(centre, n - 1 - centre, mask.offset, causal=mask.causal, far=True)
    return gated_mean(q4, k, v4, blocks, reach).flatten(-2)


# ## The module
#
# Kernels of many heads learn at very different speeds if their sizes drift apart. The paper fixes this as
# weight standardisation does: the raw kernel gives only the shape, two numbers its scale and its level.
def standardise(
    kernel: Float[Tensor, "H *n"], scale: Float[Tensor, "H"], shift: Float[Tensor, "H"]
) -> Float[Tensor, "H *n"]:
    r"""Re-parametrise: $w^h = \gamma^h\, (w^h - \mathrm{mean}\, w^h) / \mathrm{std}\, w^h + \beta^h$.

    A kernel whose entries are all equal has no shape, and gives $\beta^h$.
    Source: [zhai2021], Section 3.2. Deviation: $10^{-6}$ is added to the variance.
    """
    flat = kernel.flatten(1)
    centred = flat - flat.mean(dim=1, keepdim=True)
    shape = centred * torch.rsqrt(centred.square().mean(dim=1, keepdim=True) + 1e-6)
    return (scale[:, None] * shape + shift[:, None]).view(kernel.shape)


class KernelLayer(AFTLayer):
    r"""A member of the family with one kernel of position biases a head, in any number of dimensions.

    Source: [zhai2021], Section 3.2. Deviation: the scale starts at 0 as the paper's does, so that training
    begins with AFT-simple; the raw kernels start as standard normal noise.

    Raises:
        ValueError: `d_model` is not a multiple of `heads`, or a size is not a positive whole number.
    """

    def __init__(self, heads: int, d_model: int, shape: tuple[int, ...], bias: bool):
        check_sizes(heads=heads, d_model=d_model)
        check_heads(d_model, heads)
        super().__init__(d_model, bias, keys=heads)
        self.heads = heads
        self.kernel = nn.Parameter(torch.empty(heads, *shape))
        self.scale = nn.Parameter(torch.empty(heads))
        self.shift = nn.Parameter(torch.empty(heads))
        self._reset_kernel()

    def reset_parameters(self) -> None:
        r"""Draw the projections and kernels anew, and let the kernels start without effect."""
        super().reset_parameters()
        self._reset_kernel()

    def _reset_kernel(self) -> None:
        nn.init.normal_(self.kernel)
        nn.init.zeros_(self.scale)
        nn.init.zeros_(self.shift)

    def biases(self) -> Float[Tensor, "H *n"]:
        r"""Give the kernels as they enter the equation."""
        return standardise(self.kernel, self.scale, self.shift)


class AFTConv(KernelLayer):
    r"""AFT-conv with its four projections and one kernel of position biases a head.

    The kernel ends at the query, or has its middle there if it is `centred`. That is a matter of biases only:
    what may be read, the mask says.

    Source: [zhai2021], Section 3.2. Deviation: as `KernelLayer`.

    Raises:
        ValueError: `d_model` is not a multiple of `heads`, or a size is not a positive whole number.
    """

    def __init__(
        self, heads: int, d_model: int, kernel_size: int, bias: bool = True, *, centred: bool = False
    ):
        check_sizes(kernel_size=kernel_size)
        super().__init__(heads, d_model, (kernel_size,), bias)
        self.centre = kernel_size // 2 if centred else kernel_size - 1

    def operands(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: MaskLike = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Mask]:
        r"""Check, hide padding, project: the arguments of `aft_conv` and `aft_conv_reference`."""
        q, k, v, rules = self.project(query, key, value, mask)
        return q, k, v, self.biases(), self.centre, rules

    def mix(self, *operands: Any) -> Tensor:
        r"""Compute `aft_conv`."""
        return aft_conv(*operands)

    def prefill(
        self, x: Float[Tensor, "T B D"], state: WindowState | None = None
    ) -> tuple[Float[Tensor, "T B D"], WindowState]:
        r"""Mix a chunk causally after what `state` remembers. Cost: $T n B D$ time, $n B (D + H)$ numbers."""
        q, k, v, kernel, near, _ = self.operands(query=x, key=x, value=x, mask=Mask(causal=True))
        v4 = v.unflatten(-1, (self.heads, -1))
        state = WindowState.empty(k, v4, near) if state is None else state
        keys, values = state.prepend(k, v4)
        y = aft_conv(q, keys, values.flatten(-2), kernel, near, Mask(causal=True, offset=near + 1))
        return self.output(y), state.extend(k, v4, near)

    def step(
        self, x_t: Float[Tensor, "B D"], state: WindowState | None = None
    ) -> tuple[Float[Tensor, "B D"], WindowState]:
        r"""Mix one position. Cost: $n B D$ time, however long the text."""
        near = self.centre
        q, k, v = self.query(x_t), self.key(x_t), self.value(x_t).unflatten(-1, (self.heads, -1))
        state = WindowState.empty(k[None], v[None], near) if state is None else state
        mean = state.read(k, v, self.biases().t()[: near + 1, None]).flatten(-2)
        return self.output(torch.sigmoid(q) * mean.to(q.dtype)), state.extend(k[None], v[None], near)

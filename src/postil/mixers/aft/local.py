r"""AFT-local: biases for near pairs only.

The full model learns a bias for every pair of positions, $T^2$ numbers that tie it to one length and cost
$T^2 D$ operations. But the biases it learns are mostly local: they fade with distance. So keep those of
pairs less than a window apart:

$$Y_t = \sigma(Q_t) \odot
\frac{\sum_{s} \exp(K_s + w_{t,s}) \odot V_s}{\sum_{s} \exp(K_s + w_{t,s})}, \qquad
w_{t,s} = 0 \ \text{ where } |t - s| \ge \mathrm{window} \tag{1}$$

The last condition is easily misread. The *bias* ends at the window, the reading does not: a far key still
counts, with the weight of its own $e^{K_s}$. Every position reads the whole sequence, and yet the cost is
$T \cdot \mathrm{window} \cdot D$, since all far keys have the same weight for every query and can be summed
once.

:paper: zhai2021
:terms:
    Q: q
    K: k
    V: v
    w: band, pos_bias
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from postil.masks import Mask, MaskLike, dense_mask
from postil.mixer import check_sizes
from postil.mixers.aft.full import aft_full_reference
from postil.mixers.aft.gated_mean import Reach, gated_mean
from postil.mixers.aft.layer import AFTLayer, check_length, hide_keys
from postil.mixers.aft.log_space import log_space_mean
from postil.mixers.aft.sums import WindowState

__all__ = ["AFTLocal", "aft_local", "aft_local_reference", "local_bias", "skew"]


# ## The equation, literally
#
# The biases are stored as a band: row $t$, column $j$ belongs to the pair $(t, s)$ with
# $s = t + j - (\mathrm{window} - 1)$. Of a $T \times T$ table nothing else could ever be used, and 65,536
# positions would need 16 GiB of it.
def local_bias(
    band: Float[Tensor, "positions band"], queries: int, keys: int, offset: int = 0
) -> Float[Tensor, "T S"]:
    r"""Write a band of biases out as the matrix $w$ of equation (1), zero outside of the window."""
    t = torch.arange(offset, offset + queries, device=band.device)[:, None]
    column = torch.arange(keys, device=band.device) - t + band.shape[1] // 2
    inside = (column >= 0) & (column < band.shape[1])
    return band[t, column.clamp(0, band.shape[1] - 1)].where(inside, 0.0)


def aft_local_reference(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B D"],
    v: Float[Tensor, "S B D"],
    band: Float[Tensor, "positions band"],
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""Equation (1): the full model with biases that are zero outside of the window.

    Source: [zhai2021], Section 3.2. Cost: $T S B D$ time and memory.
    """
    return aft_full_reference(q, k, v, local_bias(band, q.shape[0], k.shape[0], mask.offset), mask)


# ## The fast form
#
# Split the sums of equation (1) at the window. The near part is a product with a matrix of few columns; the
# far part does not depend on $t$ except for where it ends, so it is a running sum:
#
# $$\sum_s e^{K_s + w_{t,s}} V_s = \sum_{|t-s| < \mathrm{window}} e^{w_{t,s}}\, e^{K_s} V_s
# + \sum_{|t-s| \ge \mathrm{window}} e^{K_s} V_s$$
#
# Summing *all* keys and correcting the near ones by $e^{w} - 1$ looks simpler. But for a strongly negative
# bias it subtracts nearly equal numbers, and the digits are gone.
def aft_local(
    q: Float[Tensor, "T B D"],
    k: Float[Tensor, "S B D"],
    v: Float[Tensor, "S B D"],
    band: Float[Tensor, "positions band"],
    mask: Mask,
) -> Float[Tensor, "T B D"]:
    r"""Equation (1) as near products and far sums.

    Block by block of $C$ queries, $[N; D] = A\,[e^{k-m} v;\, e^{k-m}] + f \odot \mathrm{far}$ with
    $A = e^{w - \max w}$ on the near keys, $f = e^{-\max w}$, `far` the sums of all keys beyond, $m$ the
    largest key before the chunk; then $y = \sigma(q)\, N / D$. A mask's `window` ends the reading as well.

    Cost: $T\,\mathrm{window}\,B D$ time, $T B D$ memory. A dense mask takes the general form, $T S B D$ time.
    """
    k, v = hide_keys(k, v, mask)
    if mask.dense is not None:
        bias = local_bias(band, q.shape[0], k.shape[0], mask.offset)
        allowed = dense_mask(mask, q.shape[0], k.shape[0], q.device)
        mean = log_space_mean(k.flatten(1)[..., None], v.flatten(1)[..., None, None], bias[None], allowed)
        return torch.sigmoid(q) * mean.view(q.shape)
    band = band[mask.offset : mask.offset + q.shape[0]]
    return _local(q, k, v, band, mask.offset, mask.causal, mask.window)


def _local(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, start: int, causal: bool, window: int | None = None
) -> Tensor:
    side = band.shape[1] // 2
    # A mask's window ends the reading, so it is as wide as the matrix must be, and there is no far part.
    if window is not None:
        band = F.pad(band, (window - 1 - side, window - 1 - side))
        side = window - 1
    if causal:
        band = band[:, : side + 1]
    far = window is None
    reach = Reach(side, 0 if causal else side, start, causal, far, skewed=True)
    blocks = skew(band, _block_rows(band.shape[1]), 0.0 if far else -math.inf)
    if causal:
        r, c = (torch.arange(n, device=q.device) for n in blocks.shape[1:])
        blocks = blocks.masked_fill(c > r[:, None] + side, -math.inf)
    # Channels do not know of each other: batch and width are one axis of columns, each with a key of its own.
    q4, k3, v4 = q.flatten(1)[..., None, None], k.flatten(1)[..., None], v.flatten(1)[..., None, None]
    return gated_mean(q4, k3, v4, blocks[None], reach).view(q.shape)


# A block of $C$ queries multiplies $C + \mathrm{window} - 1$ keys where each query needs only `window`. Small
# blocks waste less, large ones use the processor better.
def _block_rows(width: int) -> int:
    return 16 if width <= 48 else 32 if width <= 128 else 64


# Row $r$ of a block must be shifted right by $r$. Rows padded to a common length and read again with a length
# one less do just that: each row starts one place later than the one before.
def skew(band: Float[Tensor, "T W"], c: int, fill: float) -> Float[Tensor, "blocks C K"]:
    r"""Cut a band into blocks of `c` rows and shift each row by its place, $K = W + C - 1$ columns."""
    rows, width = band.shape
    blocks = -(-rows // c)
    band = F.pad(band, (0, 0, 0, blocks * c - rows)).view(blocks, c, width)
    padded = F.pad(band, (0, c), value=fill).flatten(1)
    return padded[:, : c * (width + c - 1)].view(blocks, c, width + c - 1)


# ## The module
class AFTLocal(AFTLayer):
    r"""AFT-local with its four projections and a band of position biases, which start at zero.

    A key `window` positions away or more is read with bias 0. Sequences may be as long as `seq_len`.

    Source: [zhai2021], Section 3.2. Deviation: the paper also tries to factorise $w$; see `AFTFull`.

    Raises:
        ValueError: a size is not a positive whole number.
    """

    def __init__(self, d_model: int, seq_len: int, local_window_size: int, bias: bool = True):
        super().__init__(d_model, bias)
        check_sizes(seq_len=seq_len, local_window_size=local_window_size)
        self.seq_len = seq_len
        self.local_window_size = local_window_size
        self.pos_bias = nn.Parameter(torch.zeros(seq_len, 2 * local_window_size - 1))
        self.register_load_state_dict_pre_hook(_accept_table)

    @property
    def max_len(self) -> int:
        r"""Longest text the position biases are made for."""
        return self.seq_len

    def reset_parameters(self) -> None:
        r"""Draw the projections anew and set the position biases to zero."""
        super().reset_parameters()
        nn.init.zeros_(self.pos_bias)

    # Nothing here is computed with it, but it says what local means, and old checkpoints hold one.
    @staticmethod
    def create_local_mask(seq_len: int, local_window_size: int) -> Bool[Tensor, "T T"]:
        r"""Give the pairs that have a bias: true where $|t - s| < \mathrm{window}$."""
        t = torch.arange(seq_len)
        return (t[:, None] - t[None, :]).abs() < local_window_size

    def operands(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: MaskLike = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Mask]:
        r"""Check, hide padding, project: the arguments of `aft_local` and `aft_local_reference`."""
        q, k, v, rules = self.project(query, key, value, mask)
        check_length(rules.offset + q.shape[0], self.seq_len)
        return q, k, v, self.pos_bias, rules

    def mix(self, *operands: Any) -> Tensor:
        r"""Compute `aft_local`."""
        return aft_local(*operands)

    # ## Decoding
    #
    # The state keeps `window - 1` keys and values and the sums of all before, see the page `sums`.
    def prefill(
        self, x: Float[Tensor, "T B D"], state: WindowState | None = None
    ) -> tuple[Float[Tensor, "T B D"], WindowState]:
        r"""Mix a chunk causally after what `state` remembers.

        Cost: $T\,\mathrm{window}\,B D$ time; the state holds about $2 \cdot \mathrm{window}\,B D$ numbers.
        """
        q, k, v, band, _ = self.operands(query=x, key=x, value=x, mask=Mask(causal=True))
        near = self.local_window_size - 1
        state = WindowState.empty(k, v, near) if state is None else state
        end = state.position + x.shape[0]
        check_length(end, self.seq_len, "the text")
        y = _local(q, *state.prepend(k, v), band[state.position : end], near + 1, causal=True)
        return self.output(y), state.extend(k, v, near)

    def step(
        self, x_t: Float[Tensor, "B D"], state: WindowState | None = None
    ) -> tuple[Float[Tensor, "B D"], WindowState]:
        r"""Mix one position. Cost: $\mathrm{window}\,B D$ time, however long the text."""
        q, k, v = self.query(x_t), self.key(x_t), self.value(x_t)
        near = self.local_window_size - 1
        state = WindowState.empty(k[None], v[None], near) if state is None else state
        check_length(state.position + 1, self.seq_len, "the text")
        bias = self.pos_bias[state.position : state.position + 1, : near + 1].t()[..., None]
        mean = state.read(k, v, bias)
        return self.output(torch.sigmoid(q) * mean.to(q.dtype)), state.extend(k[None], v[None], near)


# ## Older checkpoints
#
# labml-nn stores a full table of biases, of which its mask lets the band through, and the mask itself. Such a
# state dict is turned into ours on its way in.
def _accept_table(module: AFTLocal, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    mask, table = state_dict.pop(prefix + "local_mask", None), state_dict.get(prefix + "pos_bias")
    if mask is None or table is None:
        return
    window, longest = int(mask[0].sum()), table.shape[0]
    if (longest, window) == (module.seq_len, min(module.local_window_size, module.seq_len)):
        state_dict[prefix + "pos_bias"] = table_to_band(table, module.local_window_size)
        return
    rest[-1].append(
        f"{prefix}pos_bias was made for seq_len={longest} and local_window_size={window}, this module for "
        f"seq_len={module.seq_len} and local_window_size={module.local_window_size}"
    )
    state_dict[prefix + "pos_bias"] = module.pos_bias


def table_to_band(table: Float[Tensor, "T T"], window: int) -> Float[Tensor, "T band"]:
    r"""Keep of a full table of biases what equation (1) can use."""
    t = torch.arange(table.shape[0], device=table.device)[:, None]
    s = t + torch.arange(1 - window, window, device=table.device)
    inside = (s >= 0) & (s < table.shape[0])
    return table[t, s.clamp(0, table.shape[0] - 1)].where(inside, 0.0)


# ## What to try next
#
# A task that needs one distance: give back what stood two positions ago. The biases of that distance grow and
# the others sink, so that a query reads hardly anything else, though it may read all.
#
# ```python example T=12 B=32 D=8 window=4
# torch.manual_seed(0)
# mixer, causal = AFTLocal(8, 12, local_window_size=4), Mask(causal=True)
# optimizer = torch.optim.Adam(mixer.parameters(), 0.05)
# for _ in range(100):
#     x = torch.randn(12, 32, 8)
#     y = mixer(query=x, key=x, value=x, mask=causal)
#     loss = (y[2:] - x[:-2]).square().mean()
#     optimizer.zero_grad()
#     loss.backward()
#     optimizer.step()
# q, k, v, band, rules = mixer.operands(query=x, key=x, value=x, mask=causal)
# w, allowed = local_bias(band, 12, 12), dense_mask(causal, 12, 12, x.device)
# weights = (k[None, :, 0] + w[..., None]).masked_fill(~allowed, -math.inf).softmax(dim=1)
# plots = {
#     "The window: pairs that have a bias": AFTLocal.create_local_mask(12, 4).float(),
#     "Learned biases, of pairs that may be read": w.tril(),
#     "Weights, mean over channels: rows read columns": weights.mean(dim=2),
# }
# ```
#
# With `local_window_size=2` no bias reaches so far back, and the error stays at 0.74 instead of 0.01;
# guessing 0 gives 1. On a text, with the biases of every layer at the end:
#
# ```sh
# postil train --experiment aft --max-time 120 --out runs/aft
# postil show runs/aft --prompt "It is the east, and Juliet is the sun."
# ```

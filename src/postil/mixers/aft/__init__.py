r"""The Attention Free Transformer.

Attention computes a weight for every pair of positions from the content of both, and that costs
$T^2$ weights for each head and each sequence. This family of models asks how much of it is needed. Its
members keep a weighted mean over positions, and let a key and a place, but no query, decide on the weights:

$$Y_t = \sigma(Q_t) \odot
\frac{\sum_s \exp(K_s + w_{t,s}) \odot V_s}{\sum_s \exp(K_s + w_{t,s})} \tag{1}$$

All products are elementwise, so every channel takes its own mean, and the query $Q_t$ is left with a gate.

![Bars for exp K_s, one for each earlier position s; below them the biases w of the last n positions, and 0
before those; below them the products of both, which weigh the values V_s. Their mean, a quotient of two sums,
passes a gate of Q_t and becomes Y_t.](aft.svg)

The members differ in the position biases $w$:

| member | $w_{t,s}$ | time | state |
| --- | --- | --- | --- |
| `AFTFull` | a free table, or a product of two thin ones | $T^2 D$ | $T D$ |
| `AFTLocal` | free if less than $n$ apart, else 0 | $T\,n\,D$ | $n\,D$ |
| `AFTConv` | a kernel of $n$ numbers a head, of $s - t$; one key channel a head | $T\,n\,D$ | $n\,D$ |
| `AFTConv2d` | the same for pictures of width $b$, in both coordinates | $T\,n\,b\,D$ | $n\,b\,D$ |
| `AFTSimple` | 0 | $T D$ | $D$ |

None of them needs more than $T D$ memory. Each has a page with its equation, literal and fast. What the fast
forms share has pages as well: `layer` (four linear maps around a mean), `gated_mean` (near products and far
sums), `walk` and `walk_back` (how they follow a sequence, forward and backward), `kernel` (the same walk
compiled), `all_pairs` (a bias for every pair), `redo` and `log_space` (what leaves their range), `sums` (what
decoding must remember).

A bias of 0 is not a mask. Outside of a window a key is still read, with the weight of its own $e^{K_s}$; only
a mask keeps it from being read.

:paper: zhai2021
"""

from postil.mixers.aft.conv import AFTConv, aft_conv, aft_conv_reference
from postil.mixers.aft.conv2d import AFTConv2d, aft_conv2d, aft_conv2d_reference
from postil.mixers.aft.full import AFTFull, FullState, aft_full, aft_full_reference
from postil.mixers.aft.local import AFTLocal, aft_local, aft_local_reference
from postil.mixers.aft.simple import AFTSimple, aft_simple, aft_simple_reference
from postil.mixers.aft.sums import Sums, WindowState

__all__ = [
    "AFTConv",
    "AFTConv2d",
    "AFTFull",
    "AFTLocal",
    "AFTSimple",
    "FullState",
    "Sums",
    "WindowState",
    "aft_conv",
    "aft_conv2d",
    "aft_conv2d_reference",
    "aft_conv_reference",
    "aft_full",
    "aft_full_reference",
    "aft_local",
    "aft_local_reference",
    "aft_simple",
    "aft_simple_reference",
]


# ## What to try next
#
# One task that needs one distance: give back what stood two positions ago. Each member learns it as far as
# its biases can say *two*; AFT-simple has none, and averages.
#
# ```python example T=10 B=32 D=8
# import torch
# from postil.masks import Mask
# from postil.mixers.aft.conv import conv_bias
# from postil.mixers.aft.local import local_bias
#
# torch.manual_seed(0)
# members = {
#     "full": AFTFull(8, 10),
#     "local": AFTLocal(8, 10, 4),
#     "conv": AFTConv(2, 8, 4),
#     "simple": AFTSimple(8),
# }
# losses = {}
# for name, mixer in members.items():
#     optimizer = torch.optim.Adam(mixer.parameters(), 0.08)
#     for _ in range(60):
#         x = torch.randn(10, 32, 8)
#         y = mixer(query=x, key=x, value=x, mask=Mask(causal=True))
#         loss = (y[2:] - x[:-2]).square().mean()
#         optimizer.zero_grad()
#         loss.backward()
#         optimizer.step()
#     losses[name] = loss
# full = members["full"].position_biases(10, 10).tril()
# local = local_bias(members["local"].pos_bias, 10, 10).tril()
# conv = conv_bias(members["conv"].biases(), 3, 10, 10)[0]
# plots = {
#     "Mean squared error at the end": losses,
#     "Biases of AFT-full: rows read columns": full,
#     "Biases of AFT-local, window 4": local,
#     "Kernel of AFT-conv, head 1": conv,
# }
# ```
#
# On a text, all members side by side, and what their biases have become:
#
# ```sh
# postil compare aft-full aft-local aft-conv aft-simple --max-time 60 --out runs/aft
# postil show runs/aft/aft-local/seed-1 --prompt "It is the east, and Juliet is the sun."
# ```

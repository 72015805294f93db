r"""The Attention Free Transformer.

Attention computes a weight for every pair of positions from the content of both, and that costs
$T^2$ weights for each head and each sequence. This family of models asks how much of it is needed. Its
members keep a weighted mean over positions, and let a key and a place, but no query, decide on the weights:

$$Y_t = \sigma(Q_t) \odot
\frac{\sum_s \exp(K_s + w_{t,s}) \odot V_s}{\sum_s \exp(K_s + w_{t,s})} \tag{1}$$

All products are elementwise, so every channel takes its own mean, and the query $Q_t$ is left with a gate.
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
sums), `walk` and `walk_back` (how they follow a sequence, forward and backward), `all_pairs` (a bias for
every pair), `redo` and `log_space` (what leaves their range), `sums` (what decoding must remember).

A bias of 0 is not a mask. Outside of a window a key is still read, with the weight of its own $e^{K_s}$; only
a mask keeps it from being read.
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

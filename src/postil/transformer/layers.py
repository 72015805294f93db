r"""The transformer layer: a mixer and a feed-forward network, each beside a path that skips it.

A layer adds what its parts compute to what came in. Every part reads a normalised copy of the sum so far
("pre-norm"):

$$\begin{aligned}
x &\leftarrow x + \operatorname{mix}(\operatorname{norm}(x)) \\
x &\leftarrow x + \operatorname{mix}(\operatorname{norm}(x), \mathrm{src}) \qquad \text{(decoders only)} \\
x &\leftarrow x + \operatorname{FFN}(\operatorname{norm}(x))
\end{aligned} \tag{1}$$

The sum itself is never normalised on its way, so the gradient of the last layer reaches the first one
unchanged along it, and a model trains without the warm-up that [vaswani2017], who normalise after each
addition, cannot do without.

A layer is given its mixer: multi-head attention, AFT, or one of your own.
"""

from __future__ import annotations

import copy
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from postil.masks import MaskLike
from postil.mixer import CausalMixer, Mixer, State, check_probability, check_sizes

__all__ = ["TransformerLayer", "clone_layers"]


class TransformerLayer(nn.Module):
    r"""One layer of an encoder, a decoder or a language model, Eq. (1).

    With `src_attn` it is a decoder's layer, which also reads a second sequence, `src`.

    Source: [vaswani2017], Section 3.1. Deviation: normalises before each part, not after each addition.

    Cost: that of its parts, and $O(D)$ a position.

    Raises:
        ValueError: a part is built for another width; the message names both.
    """

    def __init__(
        self,
        *,
        d_model: int,
        self_attn: Mixer,
        src_attn: Mixer | None = None,
        feed_forward: nn.Module,
        dropout_prob: float,
    ):
        super().__init__()
        check_sizes(d_model=d_model)
        check_probability(dropout_prob=dropout_prob)
        _check_width(d_model, self_attn=self_attn, src_attn=src_attn)
        self.d_model = d_model
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout_prob)
        self.norm_self_attn = nn.LayerNorm(d_model)
        if src_attn is not None:
            self.norm_src_attn = nn.LayerNorm(d_model)
        self.norm_ff = nn.LayerNorm(d_model)

    def forward(
        self,
        *,
        x: Float[Tensor, "T B D"],
        mask: MaskLike = None,
        src: Float[Tensor, "S B D"] | None = None,
        src_mask: MaskLike = None,
    ) -> Float[Tensor, "T B D"]:
        r"""Compute all positions of `x`; `mask` is for reading `x`, `src_mask` for reading `src`.

        Raises:
            ValueError: `src` is given to a layer without `src_attn`, or missing in one that has it.
        """
        z = self.norm_self_attn(x)
        x = x + self.dropout(self.self_attn(query=z, key=z, value=z, mask=mask))
        return self._after_mixing(x, src, src_mask)

    # Only the mixer looks at other positions of $x$. The rest of the layer serves all of a sequence, a chunk
    # of it, or one position, and needs no state.
    def _after_mixing(self, x: Tensor, src: Tensor | None, src_mask: MaskLike) -> Tensor:
        self._check_src(src)
        if self.src_attn is not None:
            z = self.norm_src_attn(x)
            x = x + self.dropout(self.src_attn(query=z, key=src, value=src, mask=src_mask))
        return x + self.dropout(self.feed_forward(self.norm_ff(x)))

    def prefill(
        self,
        x: Float[Tensor, "T B D"],
        state: State | None = None,
        *,
        src: Float[Tensor, "S B D"] | None = None,
        src_mask: MaskLike = None,
    ) -> tuple[Float[Tensor, "T B D"], State]:
        r"""Compute a chunk, causally, after the positions that `state` remembers.

        The state is the mixer's. `src` is read whole and anew each time, at $O(S D^2)$.

        Raises:
            TypeError: `self_attn` cannot be decoded.
        """
        mixed, state = self._causal_mixer().prefill(self.norm_self_attn(x), state)
        return self._after_mixing(x + self.dropout(mixed), src, src_mask), state

    def step(
        self,
        x_t: Float[Tensor, "B D"],
        state: State | None = None,
        *,
        src: Float[Tensor, "S B D"] | None = None,
        src_mask: MaskLike = None,
    ) -> tuple[Float[Tensor, "B D"], State]:
        r"""Compute one position after those that `state` remembers.

        Raises:
            TypeError: `self_attn` cannot be decoded.
        """
        mixed, state = self._causal_mixer().step(self.norm_self_attn(x_t), state)
        # From here on the layer works on sequences, so the one position is made a sequence of length one, and
        # taken out of it again at the end.
        x = (x_t + self.dropout(mixed))[None]
        return self._after_mixing(x, src, src_mask)[0], state

    def _causal_mixer(self) -> CausalMixer:
        if not isinstance(self.self_attn, CausalMixer):
            raise TypeError(
                f"{type(self.self_attn).__name__} has no prefill and step, so it cannot be decoded token by "
                f"token; a mixer that can derives from CausalMixer"
            )
        return self.self_attn

    # To skip the second part in silence would train a decoder that never sees what it should translate.
    def _check_src(self, src: Tensor | None) -> None:
        if src is not None and self.src_attn is None:
            raise ValueError("src was given, but the layer has no src_attn to read it with")
        if src is None and self.src_attn is not None:
            raise ValueError("the layer has src_attn, but no src was given for it to read")


# A deep copy alone would start all layers with the same numbers. They would not stay equal, since each gets
# gradients of its own, but for a while they compute much the same thing and depth buys little.
def clone_layers(layer: nn.Module, n_layers: int) -> nn.ModuleList:
    r"""Stack `layer` itself and `n_layers - 1` copies of it, each with parameters drawn anew.

    Every module in a copy that has `reset_parameters` is asked to draw its own.

    Raises:
        TypeError: a module owns parameters but has no `reset_parameters`; the message names it.
    """
    check_sizes(n_layers=n_layers)
    if n_layers > 1:
        _check_resettable(layer)
    copies = [copy.deepcopy(layer) for _ in range(n_layers - 1)]
    for clone in copies:
        # Children before parents: where a parent draws a child's parameters in a way of its own, its
        # word is the last.
        for module in reversed(list(clone.modules())):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
    return nn.ModuleList([layer, *copies])


def _check_resettable(layer: nn.Module) -> None:
    for name, module in layer.named_modules():
        if any(True for _ in module.parameters(recurse=False)) and not hasattr(module, "reset_parameters"):
            raise TypeError(
                f"{type(module).__name__} at {name or 'the layer itself'!r} owns parameters but has no "
                f"reset_parameters(), so its copies would all start identical; give it that method"
            )


def _check_width(d_model: int, **mixers: Any) -> None:
    for name, mixer in mixers.items():
        width = getattr(mixer, "d_model", d_model)
        if width != d_model:
            raise ValueError(f"{name} has d_model={width}, the layer has d_model={d_model}")

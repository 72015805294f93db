r"""A language model: tokens in, a distribution over the next token out.

Around a backbone of $L$ layers stand only two tables. The *embedding* turns each token into a vector and
adds its position; the *generator* turns each final vector into one logit a token of the vocabulary. Token
ids come as `[B, T]`, the way texts are stacked; inside, sequences are time-major.

$$p(x_{t+1} \mid x_{\le t}) = \mathrm{softmax}(z_t), \qquad
z = \mathrm{Generator}(\mathrm{Backbone}(\mathrm{Embed}(x)))$$

Because the backbone is causal, one pass over a text of $T$ tokens trains $T$ predictions at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from postil.mixer import Backbone, State
from postil.transformer.encoder_decoder import Generator
from postil.transformer.positions import TokenEmbeddings

__all__ = ["IGNORED", "LanguageModel", "LanguageModelState", "NextTokenLoss", "next_token_loss"]

IGNORED = -100
"""A target of this value is not predicted: it marks padding, or tokens outside a masked loss."""


class LanguageModelState(NamedTuple):
    r"""What generating text must remember: how many tokens have been read, and the backbone's own state."""

    position: int
    backbone: State


class LanguageModel(nn.Module):
    r"""Embedding, causal backbone, generator.

    With `tie_weights` the generator uses the embedding's table, so that a token is predicted by the
    likeness of the final vector to the token's own embedding.

    `max_len` is the longest text the parts can take, `None` where nothing limits it.

    Source: [vaswani2017], Section 3.4; tied weights: [press2017].
    """

    def __init__(
        self,
        embedding: TokenEmbeddings,
        backbone: Backbone,
        generator: Generator,
        *,
        max_len: int | None = None,
        tie_weights: bool = False,
    ):
        super().__init__()
        self.embedding = embedding
        self.backbone = backbone
        self.generator = generator
        self.max_len = max_len
        self.tied = tie_weights
        if tie_weights:
            generator.projection.weight = embedding.linear.weight

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        r"""Give the logits of the token that follows each position.

        Raises:
            ValueError: the text is longer than `max_len`.
        """
        self._check_length(ids.shape[1])
        return self.generator(self.backbone(self.embedding(ids.transpose(0, 1)))).transpose(0, 1)

    def prefill(
        self, ids: Int[Tensor, "B T"], state: LanguageModelState | None = None
    ) -> tuple[Float[Tensor, "B T V"], LanguageModelState]:
        r"""Read a chunk of text after what `state` remembers; give its logits and the new state.

        Raises:
            ValueError: the text would grow longer than `max_len`.
        """
        position = 0 if state is None else state.position
        self._check_length(position + ids.shape[1])
        x = self.embedding(ids.transpose(0, 1), offset=position)
        y, backbone = self.backbone.prefill(x, None if state is None else state.backbone)
        return self.generator(y).transpose(0, 1), LanguageModelState(position + ids.shape[1], backbone)

    def step(
        self, ids: Int[Tensor, "B"], state: LanguageModelState | None = None
    ) -> tuple[Float[Tensor, "B V"], LanguageModelState]:
        r"""Read one token a row; give the logits of the next one and the new state."""
        position = 0 if state is None else state.position
        self._check_length(position + 1)
        x_t = self.embedding(ids[None], offset=position)[0]
        y_t, backbone = self.backbone.step(x_t, None if state is None else state.backbone)
        return self.generator(y_t), LanguageModelState(position + 1, backbone)

    def _check_length(self, length: int) -> None:
        if self.max_len is not None and length > self.max_len:
            raise ValueError(
                f"a text of {length} tokens is too long: this model reads at most {self.max_len}"
            )


def next_token_loss(
    logits: Float[Tensor, "*positions V"], targets: Int[Tensor, "*positions"]
) -> Float[Tensor, ""]:
    r"""Sum of $-\ln p(\mathrm{target})$ over the positions, in nats, summed in float32 or wider."""
    logits = logits.flatten(0, -2)
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="sum")


# Wrappers that compile a model or spread it over machines look for one `forward`. So what an update needs
# of a batch is a module too.
class NextTokenLoss(nn.Module):
    r"""Loss and number of correct predictions of a language model on a batch, both summed over its targets.

    The sum, not the mean: micro-batches with unequal numbers of real tokens may then simply be added and
    divided once by the count of them all. A mean of means would weigh the short ones too much.
    """

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(
        self, ids: Int[Tensor, "B T"], targets: Int[Tensor, "B T"]
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        r"""Sum the loss in nats, and count the targets that were the likeliest token."""
        # Transposed back, the logits are contiguous, as they were computed: the loss need not copy them.
        logits, targets = self.model(ids).transpose(0, 1), targets.transpose(0, 1)
        correct = (logits.detach().argmax(dim=-1) == targets).sum()
        return next_token_loss(logits, targets), correct

r"""Embeddings: tokens and their positions become vectors.

Attention reads a set: permute the positions, and its outputs are permuted alike. Order has to come in with
the input. [vaswani2017] add to each token's vector one that depends on its position alone, either a fixed
one made of waves,

$$P_{p, 2i} = \sin\!\left(\frac{p}{10000^{2i/D}}\right), \qquad
  P_{p, 2i+1} = \cos\!\left(\frac{p}{10000^{2i/D}}\right) \tag{1}$$

or a learned table. The input of the first layer is then, for token $x_p$ with embedding $e(x_p)$,

$$\sqrt{D}\; e(x_p) + P_p \tag{2}$$
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from postil.mixer import check_sizes

__all__ = [
    "EmbeddingsWithLearnedPositionalEncoding",
    "EmbeddingsWithPositionalEncoding",
    "TokenEmbeddings",
    "fixed_positions",
]


# Each pair of columns is one wave, from a wavelength of $2\pi$ positions up to $10000 \cdot 2\pi$. A shift
# by $k$ positions turns every pair by a fixed angle, so "$k$ back" is a linear map of $P_p$, the same for
# all $p$: relative distance can be read off by the query and key projections.
def fixed_positions(max_len: int, d_model: int) -> Float[Tensor, "max_len D"]:
    r"""Write out the table of Eq. (1), one row a position.

    Source: [vaswani2017], Section 3.5. Deviation: none; an odd `d_model` drops the last cosine.

    Cost: $\mathrm{max\_len} \cdot D$ sines.
    """
    check_sizes(max_len=max_len, d_model=d_model)
    # In float64: an angle of some thousand radians, multiplied in float32, is off in its fourth decimal.
    position = torch.arange(max_len, dtype=torch.float64)[:, None]
    frequency = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle = position * frequency
    waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    return waves[:, :d_model].to(torch.get_default_dtype())


# If embeddings have variance $1/D$ a component, the same matrix also serves as the output layer: logits of
# a normalised vector then start with variance 1. The factor $\sqrt{D}$ brings the input back to variance 1,
# so that tokens are not drowned by positions, whose components are of order 1.
class TokenEmbeddings(nn.Module):
    r"""Vectors of tokens, scaled by $\sqrt{D}$, without positions.

    For models whose layers know the order of their input: AFT with position biases, the Feedback
    Transformer, anything recurrent. The weight, `linear.weight`, can be shared with a
    `Generator`: `generator.projection.weight = embeddings.linear.weight` [press2017].

    Source: [vaswani2017], Section 3.4.
    """

    max_len: int | None = None
    """The most positions there are vectors for; `None`: any number."""

    def __init__(self, d_model: int, n_vocab: int):
        super().__init__()
        check_sizes(d_model=d_model, n_vocab=n_vocab)
        self.d_model = d_model
        self.linear = nn.Embedding(n_vocab, d_model)
        TokenEmbeddings.reset_parameters(self)

    def reset_parameters(self) -> None:
        r"""Draw the embeddings anew, with variance $1/D$."""
        nn.init.normal_(self.linear.weight, std=self.d_model**-0.5)

    # `offset` is what decoding needs: the tokens of one step are not at position 0.
    def forward(self, ids: Int[Tensor, "T B"], offset: int = 0) -> Float[Tensor, "T B D"]:
        r"""Embed token `ids`, of which the first stands at position `offset` of its sequence."""
        return self.linear(ids) * math.sqrt(self.d_model)


class EmbeddingsWithPositionalEncoding(TokenEmbeddings):
    r"""Vectors of tokens plus the fixed waves of Eq. (1).

    The table follows from its size, so it is in no checkpoint: one trained at a `max_len` loads at any other.

    Source: [vaswani2017], Sections 3.4 and 3.5.
    """

    positional_encodings: Tensor

    def __init__(self, d_model: int, n_vocab: int, max_len: int = 5000):
        super().__init__(d_model, n_vocab)
        self.max_len = max_len
        self.register_buffer(
            "positional_encodings", fixed_positions(max_len, d_model)[:, None], persistent=False
        )
        self.register_load_state_dict_pre_hook(_drop_stored_table)

    def forward(self, ids: Int[Tensor, "T B"], offset: int = 0) -> Float[Tensor, "T B D"]:
        r"""Embed token `ids`, of which the first stands at position `offset`.

        Raises:
            ValueError: the last token would stand beyond `max_len`.
        """
        return super().forward(ids) + _rows(self.positional_encodings, offset, ids.shape[0])


# A learned row is trained only by texts that reach it. Rows beyond the trained length still hold their
# initial zeros; that is why a longer text is an error here and not an extrapolation.
class EmbeddingsWithLearnedPositionalEncoding(TokenEmbeddings):
    r"""Vectors of tokens plus a learned vector for each position; the table starts at zero.

    Source: [vaswani2017], Section 3.5 (Table 3, row E).
    """

    def __init__(self, d_model: int, n_vocab: int, max_len: int = 5000):
        check_sizes(max_len=max_len)
        super().__init__(d_model, n_vocab)
        self.max_len = max_len
        self.positional_encodings = nn.Parameter(torch.zeros(max_len, 1, d_model))
        self.register_load_state_dict_pre_hook(_compare_lengths)

    def reset_parameters(self) -> None:
        r"""Draw the embeddings anew and set the positions to zero."""
        super().reset_parameters()
        nn.init.zeros_(self.positional_encodings)

    def forward(self, ids: Int[Tensor, "T B"], offset: int = 0) -> Float[Tensor, "T B D"]:
        r"""Embed token `ids`, of which the first stands at position `offset`.

        Raises:
            ValueError: the last token would stand beyond `max_len`.
        """
        return super().forward(ids) + _rows(self.positional_encodings, offset, ids.shape[0])


def _rows(table: Tensor, offset: int, length: int) -> Tensor:
    if offset < 0 or offset + length > table.shape[0]:
        raise ValueError(
            f"{length} tokens from position {offset} on need {offset + length} positions, but there are "
            f"max_len={table.shape[0]}; give fewer tokens or build the embeddings with a larger max_len"
        )
    return table[offset : offset + length]


# PyTorch's own message would speak of shapes; the reader knows the number by another name.
def _compare_lengths(
    module: EmbeddingsWithLearnedPositionalEncoding, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    stored = state_dict.get(prefix + "positional_encodings")
    if stored is not None and stored.shape[0] != module.max_len:
        raise ValueError(
            f"{prefix}positional_encodings in the checkpoint holds {stored.shape[0]} positions, this model "
            f"has max_len={module.max_len}; build the model with max_len={stored.shape[0]}"
        )


# Other libraries do store the fixed table. Such a checkpoint loads, provided its table is this one: to
# ignore a different table would give a different model without a word.
def _drop_stored_table(
    module: EmbeddingsWithPositionalEncoding, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    stored = state_dict.pop(prefix + "positional_encodings", None)
    if stored is None:
        return
    table = fixed_positions(stored.shape[0], module.d_model)[:, None]
    if stored.shape != table.shape or not torch.allclose(stored.to(table), table, atol=1e-2):
        raise ValueError(
            f"{prefix}positional_encodings in the checkpoint, of shape {list(stored.shape)}, is not the "
            f"table of sines and cosines for d_model={module.d_model}"
        )

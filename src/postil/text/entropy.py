r"""What a model must beat: the loss of knowing only how often each token occurs."""

from __future__ import annotations

import numpy as np

from postil.text.token_files import Tokens, count_tokens

__all__ = ["unigram_bits"]


# Frequencies are counted on the training text and paid for on the validation text, as a model's are. One is
# added to every count, or a token that training never shows would cost infinitely many bits.
def unigram_bits(training: Tokens, validation: Tokens, vocab_size: int) -> float:
    r"""Mean of $-\log_2 p(x)$ over the validation tokens, $p$ from the training tokens alone."""
    shown = count_tokens(training, vocab_size) + 1.0
    asked = count_tokens(validation, vocab_size)
    return float(-(asked * np.log2(shown / shown.sum())).sum() / asked.sum())

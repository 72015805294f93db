r"""What a run trains on.

The loop asks little of it: the batch of an update, a fixed set of batches to be judged by, the words that
tokens stand for, and the unit of the loss. Whether a batch was read from a text or made up on the spot is
not its concern.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from postil.text import Corpus, Tokenizer

__all__ = ["TrainingData"]


class TrainingData(ABC):
    r"""The data of a run: `corpus` says what they are, with a hash by which a resumed run knows them again.

    Batches are inputs and targets `[B, T]`. A target says what is to be predicted once the input at its place
    is read, and `IGNORED` asks for nothing there.
    """

    corpus: Corpus
    tokenizer: Tokenizer

    # An update must be able to ask for its batch without knowing what was asked for before: so a run that is
    # resumed goes on exactly.
    @abstractmethod
    def batch(self, update: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        r"""Give the batch of an update, counted from 1, or the share of one of `world` processes in it."""

    @abstractmethod
    def validation(
        self, rank: int = 0, world: int = 1, limit: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        r"""Give the validation sequences of one process in batches: all, or `limit` of them, always alike."""

    @property
    @abstractmethod
    def updates_per_epoch(self) -> int:
        r"""Updates in one pass over the training data, or in what stands for one."""

    @property
    @abstractmethod
    def unit(self) -> str:
        r"""What the loss is reported in, such as bits per character."""

    @property
    @abstractmethod
    def tokens_per_unit(self) -> float:
        r"""Predicted tokens that one unit takes."""

    @property
    @abstractmethod
    def unigram_bits(self) -> float:
        r"""Validation loss, in the unit, of a model that only knows how often each answer occurs."""

    @abstractmethod
    def counts(self) -> dict[str, int | None]:
        r"""Count the tokens for training (`None`: without end) and for validation."""

    @abstractmethod
    def remarks(self) -> list[str]:
        r"""Say what a person should be told before training starts."""

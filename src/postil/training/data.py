r"""The text of a run: a corpus, encoded, split and cut into windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from postil.text import (
    Batches,
    Corpus,
    Tokenizer,
    Tokens,
    Units,
    batch,
    build_tokenizer,
    default_corpus,
    encode_corpus,
    fixed_windows,
    load_corpus,
    measure,
    split,
    unseen_symbols,
)
from postil.text.entropy import unigram_bits
from postil.training.programs import TrainingPrograms, corpus_of_programs
from postil.training.settings import TrainSettings
from postil.training.source import TrainingData

__all__ = ["TrainingText", "find_corpus", "prepare_text"]


@dataclass(frozen=True)
class TrainingText(TrainingData):
    r"""What a run trains on, and how its loss becomes bits per character."""

    settings: TrainSettings
    corpus: Corpus
    tokenizer: Tokenizer
    training_tokens: Tokens
    validation_tokens: Tokens
    units: Units
    unseen: dict[str, int]

    @property
    def unit(self) -> str:
        r"""What the loss is reported in."""
        return "bits per byte" if self.tokenizer.reads_bytes else "bits per character"

    @property
    def tokens_per_unit(self) -> float:
        r"""Tokens that one character, or byte, of the validation text takes."""
        return self.units.tokens / (self.units.bytes if self.tokenizer.reads_bytes else self.units.characters)

    # A model that has only learnt how often each token occurs reaches this, and one that reads must beat it.
    @property
    def unigram_bits(self) -> float:
        r"""The validation text in bits per character (or byte) by frequencies of single tokens alone."""
        bits = unigram_bits(self.training_tokens, self.validation_tokens, self.tokenizer.vocab_size)
        return bits * self.tokens_per_unit

    @property
    def updates_per_epoch(self) -> int:
        r"""Updates that read the training text once."""
        return self._batches(0, 1).updates_per_epoch

    def counts(self) -> dict[str, int | None]:
        r"""Count the tokens of both parts."""
        return {"training": len(self.training_tokens), "validation": len(self.validation_tokens)}

    def remarks(self) -> list[str]:
        r"""Say where the text came from, if that matters, and which symbols training never shows."""
        said = [self.corpus.note] if self.corpus.note else []
        if self.unseen:
            shown = ", ".join(f"{symbol} {count} times" for symbol, count in list(self.unseen.items())[:10])
            said.append(
                f"the validation text has {len(self.unseen)} symbols that training never shows: {shown}"
            )
        return said

    def batch(self, update: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        r"""Read inputs and targets `[B, T]` of an update, counted from 1, for one of `world` processes."""
        return self._batches(rank, world)[update - 1]

    # A few hundred windows, the same each time and spread over the whole validation text, say nearly as much
    # as all of them and cost a fraction of the training.
    def validation(
        self, rank: int = 0, world: int = 1, limit: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        r"""Read the validation windows of one process in batches: all, or `limit` of them, evenly spread."""
        seq_len, rows = self.settings.model.seq_len, self._rows(world)
        whole = (len(self.validation_tokens) - 1) // seq_len
        if not limit or limit >= whole:
            yield from fixed_windows(self.validation_tokens, seq_len, rows, rank=rank, world=world)
            return
        ids = np.linspace(0, whole - 1, limit).round().astype(np.int64)[rank::world]
        for first in range(0, len(ids), rows):
            yield batch(self.validation_tokens, ids[first : first + rows] * seq_len, seq_len)

    def _batches(self, rank: int, world: int) -> Batches:
        s = self.settings
        return Batches(
            self.training_tokens,
            s.model.seq_len,
            self._rows(world),
            seed=s.seed,
            rank=rank,
            world=world,
            shuffled=s.data.order == "shuffled",
        )

    def _rows(self, world: int) -> int:
        return self.settings.optimizer.batch_size // world


def find_corpus(settings: TrainSettings) -> Corpus:
    r"""Find the text of a run: the one its settings name, or the default.

    Raises:
        TextError: there is none, or it cannot be read.
    """
    if settings.text == "algorithmic":
        return corpus_of_programs(settings)
    return default_corpus() if settings.text is None else load_corpus(settings.text)


def prepare_text(settings: TrainSettings, corpus: Corpus, tokenizer: Tokenizer | None = None) -> TrainingData:
    r"""Build the tokenizer (or take the one given, of an earlier sitting), encode the text and split it.

    Programs are made when they are needed.

    Cost: one or two readings of the text the first time; later the token file is only checked.

    Raises:
        TextError: the text cannot be read, or is too short for the windows.
    """
    if settings.text == "algorithmic":
        return TrainingPrograms(settings, corpus)
    if tokenizer is None:
        tokenizer = build_tokenizer(settings.data.tokenizer, corpus, vocab_size=settings.data.vocab_size)
    tokens = encode_corpus(corpus, tokenizer)
    fraction = settings.data.valid_fraction
    training, validation = split(
        tokens, (float(f"{1 - fraction:.12g}"), fraction), seq_len=settings.model.seq_len
    )
    return TrainingText(
        settings,
        corpus,
        tokenizer,
        training,
        validation,
        measure(tokenizer, validation),
        unseen_symbols(tokenizer, training, validation),
    )

r"""The algorithmic task as the data of a run: programs that are made when they are needed.

A program follows from a number, so there is no file, and none is seen twice: training counts up from 0,
validation down from -1, always over the same programs. What [fan2020] had, 10,000 programs read again and
again, is here only a measure of time: after as many, an epoch is over.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from postil.text import Corpus, Tokenizer
from postil.text.algorithmic import Program, ProgramTokens, batch_of_programs, make_program
from postil.training.settings import TrainSettings
from postil.training.source import TrainingData

__all__ = ["TrainingPrograms", "corpus_of_programs"]

EPOCH, VALIDATION = 10_000, 1_000
"""Programs of an epoch and for validation, as many as the paper's authors made."""


# The programs for validation are the identity of the task: a version that made others, or found other
# answers to them, must not resume a run of this one.
def corpus_of_programs(settings: TrainSettings) -> Corpus:
    r"""Write down the programs for validation with their answers, as a corpus.

    Raises:
        ValueError: the number of variables or statements is not possible.
    """
    text = "\n".join(map(_with_answers, _validation_programs(settings))) + "\n"
    raw = text.encode()
    origin = f"made: {settings.data.statements} statements, {settings.data.variables} variables"
    return Corpus("algorithmic", origin, len(raw), hashlib.sha256(raw).hexdigest(), text=text)


def _validation_programs(settings: TrainSettings) -> list[Program]:
    data = settings.data
    return [make_program(-n, data.statements, data.variables) for n in range(1, VALIDATION + 1)]


def _with_answers(program: Program) -> str:
    pairs = zip(*program, strict=True)
    return " ".join(token if answer is None else f"{token} {answer}" for token, answer in pairs)


@dataclass(frozen=True)
class TrainingPrograms(TrainingData):
    r"""Programs without end; the loss is that of the values they print, and of nothing else."""

    settings: TrainSettings
    corpus: Corpus
    tokenizer: Tokenizer = field(default_factory=ProgramTokens)

    @property
    def unit(self) -> str:
        r"""What the loss is reported in."""
        return "bits per printed value"

    @property
    def tokens_per_unit(self) -> float:
        r"""A value is one token."""
        return 1.0

    @property
    def unigram_bits(self) -> float:
        r"""The entropy of the values printed in validation, in bits."""
        programs = _validation_programs(self.settings)
        counts = Counter(answer for program in programs for answer in program.answers if answer is not None)
        return -sum(n / counts.total() * math.log2(n / counts.total()) for n in counts.values())

    @property
    def updates_per_epoch(self) -> int:
        r"""Updates in which 10,000 programs are read."""
        return max(1, EPOCH // self.settings.optimizer.batch_size)

    # Programs of a run are numbered on from update to update and from process to process. Runs of other seeds
    # stand far from one another, so that they share none.
    def batch(self, update: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        r"""Make the programs of an update, counted from 1, for one of `world` processes."""
        size = self.settings.optimizer.batch_size
        first = (self.settings.seed << 40) + (update - 1) * size + rank * (size // world)
        return self._programs(range(first, first + size // world))

    def validation(
        self, rank: int = 0, world: int = 1, limit: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        r"""Make the validation programs of one process in batches: all, or the first `limit` of them."""
        rows = self.settings.optimizer.batch_size // world
        seeds = range(-1, -1 - min(limit or VALIDATION, VALIDATION), -1)[rank::world]
        for first in range(0, len(seeds), rows):
            yield self._programs(seeds[first : first + rows])

    def counts(self) -> dict[str, int | None]:
        r"""Count tokens: without end for training."""
        programs = _validation_programs(self.settings)
        return {"training": None, "validation": sum(len(program.tokens) for program in programs)}

    def remarks(self) -> list[str]:
        r"""Say so if programs do not fit into the model's sequences."""
        longest = max(len(program.tokens) for program in _validation_programs(self.settings))
        length = self.settings.model.seq_len
        if longest <= length:
            return []
        return [
            f"programs of up to {longest} tokens are cut at model.seq_len={length}; --data.statements makes "
            f"shorter ones"
        ]

    def _programs(self, seeds: range) -> tuple[Tensor, Tensor]:
        data = self.settings.data
        return batch_of_programs(seeds, self.settings.model.seq_len, data.statements, data.variables)

r"""Evaluation: the same windows every time.

A loss on windows drawn anew each time mixes two changes, that of the model and that of the sample, and two
runs cannot be compared at all. Here the windows are fixed. Nothing is drawn, and the mode that the model
was in is put back, so a training run takes the same course however often it is evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from postil.language_model import IGNORED

__all__ = ["Score", "evaluate"]


@dataclass(frozen=True)
class Score:
    r"""Sums over predicted tokens, so that scores of parts can be added."""

    nats: float = 0.0
    correct: int = 0
    tokens: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.correct + other.correct, self.tokens + other.tokens)

    @property
    def loss(self) -> float:
        r"""Mean loss in nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def accuracy(self) -> float:
        r"""Share of tokens that were predicted as the likeliest."""
        return self.correct / self.tokens if self.tokens else math.nan

    # A text is as long as it is however it was cut into tokens, so bits per character compare tokenizers.
    def bits(self, tokens_per_unit: float) -> float:
        r"""Mean loss in bits per character (or byte), given how many tokens one of them takes."""
        return self.loss / math.log(2) * tokens_per_unit


@torch.no_grad()
def evaluate(
    loss: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device | str = "cpu"
) -> Score:
    r"""Score a `NextTokenLoss` on batches of inputs and targets `[B, T]`."""
    training = loss.training
    loss.eval()
    try:
        score = Score()
        for inputs, targets in batches:
            nats, correct = loss(inputs.to(device), targets.to(device))
            score += Score(float(nats), int(correct), int((targets != IGNORED).sum()))
        return score
    finally:
        loss.train(training)

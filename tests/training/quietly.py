"""Train without a word."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from postil.training.run import Outcome, train
from postil.training.settings import TrainSettings

QUIET = Console(quiet=True)


def run(settings: TrainSettings, **options: Any) -> Outcome:
    return train(settings, console=QUIET, **options)

"""Small runs: a made-up text, a tiny model, a quiet console."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postil.registry import ModelSettings
from postil.training.settings import DataSettings, OptimizerSettings, TrainSettings


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the folders of the person who runs it."""
    monkeypatch.setenv("POSTIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """About 8,000 characters in which the next one can be guessed, but not always."""
    path = tmp_path / "text.txt"
    words = ["the", "fox", "and", "a", "hen", "saw", "no", "dog"]
    path.write_text(" ".join(words[(i * i + 3 * i) % 8] + ("." if i % 7 == 0 else "") for i in range(2000)))
    return path


@pytest.fixture
def settings(text: Path, tmp_path: Path) -> Callable[..., TrainSettings]:
    """Settings of a run of 20 updates with dropout, to be changed by keywords."""

    def make(**changes: Any) -> TrainSettings:
        model = {"d_model": 16, "n_layers": 2, "heads": 2, "seq_len": 16, "dropout": 0.1}
        optimizer = {"batch_size": 4, "warmup": 5, "lr": 1e-2}
        return TrainSettings(
            **{
                "text": str(text),
                "updates": 20,
                "out": str(tmp_path / "run"),
                "evaluate_every": 10,
                "save_every": 5,
                "log_every": 1,
                "prompt": "the ",
                "sample_tokens": 4,
                **changes,
                "model": ModelSettings(**{**model, **changes.get("model", {})}),
                "optimizer": OptimizerSettings(**{**optimizer, **changes.get("optimizer", {})}),
                "data": DataSettings(**changes.get("data", {})),
            }
        )

    return make

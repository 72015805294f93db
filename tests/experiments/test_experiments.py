"""Every experiment has the hyperparameters of its table and trains, made small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from postil.experiments import EXPERIMENTS
from postil.training.run import train

# epochs, batch, T, D, H, d_ff, evaluations an epoch (of 123 updates), prompt
TABLE = {
    "transformer": (32, 16, 512, 256, 16, 1024, 10, "It is "),
    "aft": (128, 32, 256, 128, None, 256, 10, "It is "),
    "feedback": (128, 64, 128, 512, 8, 2048, 25, "It is"),
    "feedback-original": (128, 64, 128, 512, 8, 2048, 25, "It is"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_hyperparameters_of_the_papers_pages(name: str) -> None:
    epochs, batch, length, width, heads, hidden, evaluations, prompt = TABLE[name]
    s = EXPERIMENTS[name]
    assert (s.epochs, s.optimizer.batch_size, s.model.seq_len) == (epochs, batch, length)
    assert (s.model.d_model, s.model.d_ff, s.model.n_layers) == (width, hidden, 6)
    assert heads is None or s.model.heads == heads
    assert (s.optimizer.schedule, s.optimizer.lr, s.optimizer.warmup) == ("noam", 1.0, 2000)
    assert (s.optimizer.clip, s.prompt, s.sample_tokens) == (1.0, prompt, 25)
    assert s.evaluate_every is not None and round(123 / s.evaluate_every) == evaluations
    assert s.data.tokenizer == "characters" and s.data.valid_fraction == 0.1
    if "feedback" in name:
        assert s.model.dropout == 0.0 and s.model.positions == "none"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_made_small(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("POSTIL_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("It is the fox, and it is the hen. " * 60)
    s = EXPERIMENTS[name]
    small = replace(
        s,
        text=s.text if name == "algorithmic" else str(text),
        out=str(tmp_path / "run"),
        updates=2,
        max_time=None,
        evaluate_every=2,
        model=replace(s.model, d_model=16, n_layers=2, heads=2, d_ff=32, seq_len=24),
        optimizer=replace(s.optimizer, batch_size=2),
    )
    outcome = train(small, console=Console(quiet=True))
    assert outcome.update == 2 and outcome.bits is not None

"""Comparisons of models small enough to train in a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FLAGS = [
    "--model.d_model=8",
    "--model.heads=2",
    "--model.n_layers=1",
    "--model.seq_len=16",
    "--model.positions=learned",
    "--optimizer.batch_size=4",
    "--optimizer.warmup=5",
    "--optimizer.schedule=constant",
    "--optimizer.lr=1e-2",
    "--evaluate-every=4",
    "--log-every=2",
    "--prompt=the ",
    "--threads=1",
    "--accelerator=cpu",
]


@pytest.fixture(autouse=True)
def own_folders(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    return own_folders


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    words = ["the", "fox", "and", "a", "hen", "saw", "no", "dog"]
    path.write_text(" ".join(words[(i * i + 3 * i) % 8] + ("." if i % 7 == 0 else "") for i in range(1000)))
    return path


@pytest.fixture
def flags(text: Path) -> list[str]:
    return [f"--text={text}", *FLAGS]

"""The README's picture is made of the committed comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import picture

NAMES = ["multi-head-attention", *(f"aft-{kind}" for kind in ("full", "simple", "local", "conv"))]
NAMES += ["feedback", "feedback-original"]


def results(folder: Path, points: int = 10) -> Path:
    def run(seed: int, model: int) -> dict:
        curve = [
            [1e5 * k, 10.0 * k, 2.0 + 2.0 / k + 0.05 * model + 0.01 * seed] for k in range(1, points + 1)
        ]
        return {"seed": seed, "tokens": 10**6, "curve": curve}

    models = [{"name": name, "runs": [run(seed, n) for seed in (1, 2, 3)]} for n, name in enumerate(NAMES)]
    path = folder / "comparison.json"
    path.write_text(json.dumps({"unit": "bits per character", "contenders": models}))
    return path


def test_seven_models_by_name_in_a_small_file(tmp_path):
    text = picture.picture(results(tmp_path, points=60))
    assert all(f">{name}</text>" in text for name in NAMES)
    assert text.count("<polygon") == 7 and ">tokens</text>" in text
    assert len(text.encode()) <= 40_000


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(picture, "PICTURE", tmp_path / "comparison.svg")
    monkeypatch.setattr(picture, "RESULTS", tmp_path / "comparison.json")
    monkeypatch.setattr("sys.argv", ["picture.py"])
    assert picture.main() == 2 and "postil compare" in capsys.readouterr().err
    results(tmp_path)
    assert picture.main() == 0 and (tmp_path / "comparison.svg").read_text().startswith("<svg")
    monkeypatch.setattr("sys.argv", ["picture.py", "--check"])
    assert picture.main() == 0
    results(tmp_path, points=11)
    assert picture.main() == 1 and "stale" in capsys.readouterr().out


def test_the_committed_picture_is_current():
    if not picture.RESULTS.exists():
        pytest.skip("there is no committed comparison yet")
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.picture(picture.RESULTS)

"""Two processes compute what one does: the same parameters, in both of them, after every update."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from runs import largest_difference
from updates import session

from postil.registry import REGISTRY
from postil.training.engine import make_fabric
from postil.training.loop import train_update, validate, write_sample
from postil.training.processes import run_ranks
from postil.training.settings import TrainSettings

SCRIPT = str(Path(__file__).with_name("updates.py"))


def in_two(runs: list[TrainSettings]) -> list[list[dict[str, Any]]]:
    ended = run_ranks([sys.executable, SCRIPT, json.dumps([each.to_dict() for each in runs])], 2)
    assert all(each.well for each in ended), ended
    by_rank = sorted(ended, key=lambda each: each.rank)
    return [each.report["runs"] for each in by_rank if each.report]


@pytest.mark.case("BC067")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_are_one_after_20_updates(settings, tmp_path: Path, strategy: str, figure) -> None:
    """Whole shares, and shares cut into micro-batches, where gradients must not be exchanged too early."""
    runs = [
        settings(devices=2, strategy=strategy, out=str(tmp_path / f"micro-{micro}"), optimizer=changes)
        for micro, changes in (
            ("none", {"batch_size": 8}),
            ("1", {"batch_size": 8, "micro_batch_size": 1}),
            ("3", {"batch_size": 8, "micro_batch_size": 3}),
        )
    ]
    first, second = in_two(runs)
    single = session(settings(optimizer={"batch_size": 8}), make_fabric(settings()))
    losses = [train_update(single)[0].loss for _ in range(20)]
    expected = {name: tensor.detach() for name, tensor in single.model.state_dict().items()}
    differences = []
    for run, one, other in zip(runs, first, second, strict=True):
        assert len(set(one["hashes"])) == 20
        assert one["hashes"] == other["hashes"]
        found = safetensors.torch.load_file(f"{run.out}.safetensors")
        differences.append(largest_difference(run.mixer, expected, found))
        assert one["losses"] == pytest.approx(losses, abs=1e-6) == other["losses"]
        # 101 validation windows and a rest do not divide evenly among two.
        assert one["valid"] == pytest.approx(validate(single).loss, abs=1e-6) == other["valid"]
        assert one["sample"] == other["sample"] == write_sample(single)
    figure(difference=max(differences))
    assert max(differences) <= 1e-6


@pytest.mark.case("BC066")
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_every_mixer_trains_in_two_processes_by_default(settings, tmp_path: Path, strategy: str) -> None:
    """DDP refuses the second update if a parameter had no part in the first."""
    runs = []
    for mixer, entry in REGISTRY.items():
        s = settings(mixer=mixer, updates=3, devices=2, strategy=strategy, out=str(tmp_path / mixer))
        s.model = replace(entry.example, seq_len=16, n_layers=2)
        runs.append(s)
    first, second = in_two(runs)
    for run, one, other in zip(runs, first, second, strict=True):
        assert one["hashes"] == other["hashes"], run.mixer
        single = session(run, make_fabric(settings()))
        losses = [train_update(single)[0].loss for _ in range(3)]
        assert one["losses"] == pytest.approx(losses, abs=1e-5), run.mixer

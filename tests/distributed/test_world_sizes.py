"""A checkpoint of any number of processes opens in any other number."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import identical, largest_difference, last, run

from postil.training.saved import load_run

TWICE = {"devices": 2}


@pytest.mark.case("BC069")
@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        pytest.param({**TWICE, "strategy": "ddp"}, {}, {**TWICE, "strategy": "ddp"}, id="ddp-2-1-2"),
        pytest.param({**TWICE, "strategy": "fsdp"}, {}, {**TWICE, "strategy": "fsdp"}, id="fsdp-2-1-2"),
    ],
)
def test_two_then_one_then_two_processes(
    settings, tmp_path: Path, first: dict, second: dict, third: dict, figure
) -> None:
    straight = run(settings(out=str(tmp_path / "straight"), model={"tie_weights": True}))
    for updates, changes in ((6, first), (13, second), (20, third)):
        s = settings(updates=updates, model={"tie_weights": True}, **changes)
        outcome = run(s, resume="auto")
        assert outcome.update == updates
    one, other = last(straight.path), last(s.out)
    assert one.tensors.keys() == other.tensors.keys()
    difference = largest_difference(s.mixer, one.tensors["model"], other.tensors["model"])
    figure(difference=difference)
    assert difference <= 1e-6
    assert outcome.bits == pytest.approx(straight.bits, abs=1e-5)
    model = load_run(outcome.path).model
    assert model.generator.projection.weight is model.embedding.linear.weight


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resumed_run_of_two_processes_is_bit_identical(settings, tmp_path: Path, strategy: str) -> None:
    same = {"devices": 2, "strategy": strategy, "model": {"dropout": 0.1}}
    straight = run(settings(out=str(tmp_path / "straight"), **same))
    run(settings(updates=7, **same))
    resumed = run(settings(**same), resume="auto")
    assert identical(last(straight.path), last(resumed.path))

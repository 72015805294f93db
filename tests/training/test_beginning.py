"""Beginning from another run's weights, growing sequences, and tables of models stored by older versions."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quietly import run

from postil.registry import build_language_model
from postil.training import checkpoints
from postil.training.curves import read_metrics
from postil.training.saved import load_run
from postil.training.schedules import doubling_length
from postil.training.settings import TrainSettings

SHORT = {"updates": 3, "sample_every": 0, "optimizer": {"schedule": "constant"}}


def weights(path: str | Path) -> dict[str, torch.Tensor]:
    checkpoint = checkpoints.latest(Path(path) / "checkpoints")
    assert checkpoint is not None
    return checkpoint.tensors["model"]


def first_loss(path: str | Path) -> float:
    return next(
        line["loss"] for line in read_metrics(Path(path) / "metrics.jsonl") if line["kind"] == "train"
    )


@pytest.fixture
def parallel(settings, tmp_path: Path) -> Path:
    """A parallel transformer, trained long enough to know more than letter frequencies."""
    s = settings(updates=60, out=str(tmp_path / "parallel"), sample_every=0, model={"dropout": 0.0})
    return run(s).path


# ## Beginning from another run
def test_the_same_model_takes_over_every_weight(settings, parallel: Path, tmp_path: Path) -> None:
    # With a learning rate of zero the first update changes nothing.
    still = {"lr": 0.0, "schedule": "constant", "weight_decay": 0.0}
    out = run(settings(updates=1, out=str(tmp_path / "next"), init_from=str(parallel), optimizer=still)).path
    for name, tensor in weights(parallel).items():
        assert torch.equal(tensor, weights(out)[name]), name
    record = json.loads((out / "run.json").read_text())
    assert record["begun_from"] == {"path": str(parallel), "mixer": "multi-head-attention", "update": 60}
    assert record["settings"]["init_from"] == str(parallel)


@pytest.mark.parametrize("mixer", ["feedback", "feedback-original"])
def test_a_feedback_model_begins_as_a_parallel_one(
    settings, parallel: Path, tmp_path: Path, mixer: str
) -> None:
    both = {**SHORT, "mixer": mixer, "model": {"dropout": 0.0}}
    begun = run(settings(**both, out=str(tmp_path / "begun"), init_from=str(parallel))).path
    scratch = run(settings(**both, out=str(tmp_path / "scratch"))).path
    # Its feed-forward layers, queries and embeddings already know the text.
    assert first_loss(begun) < first_loss(scratch) - 0.5
    own, theirs = weights(begun), weights(parallel)
    assert not any("self_attn" in name.replace("norm_self_attn", "") for name in own)
    assert (own["embedding.linear.weight"] - theirs["embedding.linear.weight"]).abs().max() < 0.1


def test_positions_of_the_parallel_model_are_left_behind(settings, parallel: Path, tmp_path: Path) -> None:
    s = settings(
        **SHORT, mixer="feedback", init_from=str(parallel), model={"positions": "none", "dropout": 0.0}
    )
    assert "embedding.positional_encodings" not in weights(run(s).path)


# Distances beyond the old table share its first row, before and after; fewer distances are the nearer ones.
@pytest.mark.parametrize("mixer", ["feedback", "feedback-original"])
@pytest.mark.parametrize("seq_len", [24, 11])
def test_a_feedback_model_begins_for_texts_of_another_length(
    settings, tmp_path: Path, mixer: str, seq_len: int
) -> None:
    both = {**SHORT, "mixer": mixer, "sample_every": 0}
    first = run(settings(**both, out=str(tmp_path / "first"), model={"positions": "none"})).path
    still = {"lr": 0.0, "schedule": "constant", "weight_decay": 0.0}
    changes = {"optimizer": still, "model": {"positions": "none", "seq_len": seq_len}}
    out = run(settings(**{**both, **changes}, out=str(tmp_path / "next"), init_from=str(first))).path
    for name, old in weights(first).items():
        new = weights(out)[name]
        if name.endswith((".key_pos_embeddings", ".key_pos_bias")):
            assert old.any() and len(new) == seq_len
            shared = min(len(old), len(new))
            assert torch.equal(new[-shared:], old[-shared:]), name
            assert (new[:-shared] == old[0]).all(), name
        else:
            assert torch.equal(new, old), name


def test_what_was_begun_from_may_go_once_there_is_a_checkpoint(
    settings, parallel: Path, tmp_path: Path
) -> None:
    long = {"init_from": str(parallel), "optimizer": {"schedule": "constant"}}
    straight = run(settings(out=str(tmp_path / "straight"), **long)).path
    out = run(settings(updates=10, out=str(tmp_path / "cut"), **long)).path
    shutil.rmtree(parallel)
    run(settings(out=str(out), **long), resume="auto")
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(out)[name]), name
    assert json.loads((out / "run.json").read_text())["begun_from"]["update"] == 60


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"mixer": "aft-simple"},
            "is a run of mixer='multi-head-attention', and this one is of 'aft-simple'",
        ),
        ({"model": {"d_model": 32}}, "d_model=16 there, 32 here"),
        ({"model": {"n_layers": 3}}, "n_layers=2 there, 3 here"),
        ({"model": {"heads": 4}}, "heads=2 there, 4 here"),
        ({"mixer": "feedback", "model": {"heads": 4}}, "heads=2 there, 4 here"),
        ({"model": {"activation": "gelu"}}, "activation=relu there, gelu here"),
        ({"model": {"seq_len": 24}}, r"positional_encodings is \[16, 1, 16\] there and \[24, 1, 16\] here"),
        ({"data": {"tokenizer": "bytes"}}, "another vocabulary"),
        ({"init_from": "nowhere"}, "nowhere"),
    ],
)
def test_what_differs_is_named_and_no_folder_is_made(
    settings, parallel: Path, tmp_path: Path, changes: dict, complaint: str
) -> None:
    out = tmp_path / "other"
    with pytest.raises((ValueError, checkpoints.CheckpointError), match=complaint):
        run(settings(**{"out": str(out), "init_from": str(parallel), **changes}))
    assert not out.exists()


# ## Growing sequences
def test_lengths_double_in_even_steps() -> None:
    lengths = [doubling_length(4, 16, 6, n) for n in range(1, 9)]
    assert lengths == [4, 4, 4, 8, 8, 8, 16, 16]
    assert [doubling_length(5, 16, 4, n) for n in range(1, 7)] == [5, 5, 10, 10, 16, 16][:6]
    assert {doubling_length(16, 16, 10, n) for n in range(1, 30)} == {16}


def test_tokens_are_counted_as_they_are_read(settings) -> None:
    s: TrainSettings = settings(seq_len_from=4, seq_len_over=6)
    lengths = [s.length(n) for n in range(1, 21)]
    assert [s.tokens_after(n) for n in range(21)] == [4 * sum(lengths[:n]) for n in range(21)]
    for budget in range(1, 1000, 7):
        total = replace(s, updates=None, max_tokens=budget).total_updates(100)
        assert total is not None
        assert total == 1 or s.tokens_after(total) <= budget
        assert s.tokens_after(total + 1) > budget


@pytest.mark.parametrize("cut", [2, 6, 9])
def test_a_run_that_grows_resumes_exactly(settings, tmp_path: Path, cut: int) -> None:
    grow = {"seq_len_from": 4, "seq_len_over": 8, "optimizer": {"schedule": "constant"}}
    straight = run(settings(out=str(tmp_path / "straight"), **grow))
    run(settings(updates=cut, **grow))
    resumed = run(settings(**grow), resume="auto")
    for name, tensor in weights(straight.path).items():
        assert torch.equal(tensor, weights(resumed.path)[name]), name
    lines = [read_metrics(o.path / "metrics.jsonl") for o in (straight, resumed)]
    counts = [[(x["update"], x["tokens"], x["loss"]) for x in run if x["kind"] == "train"] for run in lines]
    assert counts[0] == counts[1]
    assert counts[0][-1][1] == 4 * (4 * 4 + 4 * 8 + 12 * 16)


def test_growing_is_decisive_and_checked(settings) -> None:
    run(settings(updates=2, seq_len_from=4, seq_len_over=8))
    with pytest.raises(ValueError, match="seq_len_over"):
        run(settings(updates=4, seq_len_from=4, seq_len_over=9), resume="auto")
    for changes, complaint in (
        ({"seq_len_from": 4}, "need both"),
        ({"seq_len_over": 4}, "need both"),
        ({"seq_len_from": 17, "seq_len_over": 4}, "must not exceed model.seq_len=16"),
        ({"seq_len_from": 0, "seq_len_over": 4}, "seq_len_from=0"),
    ):
        with pytest.raises(ValueError, match=complaint):
            settings(**changes).check()


# ## Models stored when the tables had 4,096 rows unless told otherwise
@pytest.fixture
def of_old(settings, tmp_path: Path) -> Path:
    """A run as an older version left it: long tables, and settings that say nothing of them."""
    s = settings(**SHORT, mixer="feedback", out=str(tmp_path / "old"), model={"options": {"positions": 40}})
    out = run(s).path

    def forget(values: dict) -> None:
        del values["settings"]["model"]["options"]["positions"]
        for name in ("init_from", "seq_len_from", "seq_len_over"):
            del values["settings"][name]
        for name in ("statements", "variables"):
            del values["settings"]["data"][name]

    checkpoint = checkpoints.latest(out / "checkpoints")
    assert checkpoint is not None
    forget(checkpoint.metadata)
    checkpoints.discard_later(out / "checkpoints", -1)
    checkpoints.save(out / "checkpoints", checkpoint.step, checkpoint.tensors, checkpoint.metadata, keep=2)
    record = json.loads((out / "run.json").read_text())
    forget(record)
    (out / "run.json").write_text(json.dumps(record))
    return out


def test_tables_of_distances_are_as_long_as_the_sequences(settings) -> None:
    for mixer in ("feedback", "feedback-original"):
        model = build_language_model(mixer, settings().model, 10)
        assert model.backbone.layers[0].attn.key_pos_bias.shape[0] == 16


def test_an_old_run_loads_and_goes_on(settings, of_old: Path) -> None:
    saved = load_run(of_old)
    assert saved.settings.model.options == {"positions": 40}
    longer = {**SHORT, "updates": 5}
    outcome = run(settings(**longer, mixer="feedback", out=str(of_old)), resume="auto")
    assert outcome.update == 5
    assert weights(of_old)["backbone.layers.0.attn.key_pos_bias"].shape[0] == 40
    record = json.loads((of_old / "run.json").read_text())
    assert record["settings"]["model"]["options"] == {"positions": 40}

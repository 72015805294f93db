"""A run from its settings to its folder: exact resume, fixed evaluation, micro-batches, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from quietly import QUIET, run

from postil.registry import build_language_model
from postil.training import checkpoints, loop
from postil.training.checkpoints import Checkpoint
from postil.training.curves import read_metrics
from postil.training.data import find_corpus, prepare_text
from postil.training.engine import make_fabric
from postil.training.loop import NonFiniteError, Session, start, train_update, validate
from postil.training.run import train
from postil.training.saved import load_run
from postil.training.schedules import constant, noam, warmup_cosine
from postil.training.settings import TrainSettings, settings_from_dict


def last(path: str | Path) -> Checkpoint:
    checkpoint = checkpoints.latest(Path(path) / "checkpoints")
    assert checkpoint is not None
    return checkpoint


def assert_identical(one: Checkpoint, other: Checkpoint) -> None:
    """Equal to the last bit: parameters, moments, and how far the run has come."""
    assert one.step == other.step
    for group in ("model", "optimizer"):
        assert one.tensors[group].keys() == other.tensors[group].keys()
        for name, tensor in one.tensors[group].items():
            assert torch.equal(tensor, other.tensors[group][name]), name
    same = ("update", "tokens", "best")
    assert [one.metadata["progress"][k] for k in same] == [other.metadata["progress"][k] for k in same]


def losses(path: str | Path) -> list[tuple[int, float]]:
    lines = read_metrics(Path(path) / "metrics.jsonl")
    return [(line["update"], line["loss"]) for line in lines if line["kind"] == "train"]


def session(settings: TrainSettings) -> Session:
    text = prepare_text(settings, find_corpus(settings))
    fabric = make_fabric(settings)
    return start(
        settings,
        text,
        fabric,
        lambda: build_language_model(settings.mixer, settings.model, text.tokenizer.vocab_size),
    )


def test_a_run_leaves_a_folder_that_explains_itself(settings) -> None:
    outcome = run(settings())
    assert outcome.update == 20 and outcome.reason == "all updates made"
    record = json.loads((outcome.path / "run.json").read_text())
    assert settings_from_dict(record["settings"]) == settings()
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["corpus"]["sha256"]) == 64
    kinds = [line["kind"] for line in read_metrics(outcome.path / "metrics.jsonl")]
    assert kinds.count("train") == 20 and kinds.count("valid") == 2 and kinds.count("final") == 1
    assert (outcome.path / "loss.svg").stat().st_size and (outcome.path / "loss.png").stat().st_size
    saved = load_run(outcome.path)
    assert saved.checkpoint.step == 20


def test_it_learns(settings) -> None:
    outcome = run(settings(updates=120, model={"dropout": 0.0}))
    record = json.loads((outcome.path / "run.json").read_text())
    assert outcome.bits is not None and outcome.bits < 0.8 * record["unigram_bits"]


@pytest.mark.case("BC047")
@pytest.mark.parametrize("cut", [1, 7, 10, 19])
def test_a_resumed_run_is_bit_identical_to_a_straight_one(settings, tmp_path: Path, cut: int) -> None:
    straight = run(settings(out=str(tmp_path / "straight"), optimizer={"schedule": "constant"}))
    half = settings(updates=cut, optimizer={"schedule": "constant"})
    run(half)
    torch.manual_seed(999)  # Whatever the global generator was left at.
    resumed = run(settings(optimizer={"schedule": "constant"}), resume="auto")
    assert_identical(last(straight.path), last(resumed.path))
    assert losses(straight.path) == losses(resumed.path)


@pytest.mark.case("BC053")
def test_a_killed_run_resumes_by_itself_and_ends_bit_identical(settings, tmp_path: Path) -> None:
    s = settings(updates=60, out=str(tmp_path / "straight"), save_every=3, evaluate_every=30)
    straight = run(s)
    killed = tmp_path / "killed"
    record = tmp_path / "settings.json"
    record.write_text(json.dumps({**s.to_dict(), "out": str(killed)}))
    command = [
        sys.executable,
        "-m",
        "postil.cli",
        "train",
        f"--config={record}",
        "--resume=auto",
        "--threads=1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(checkpoints.steps(killed / "checkpoints")) < 2 and process.poll() is None:
        assert time.monotonic() < deadline, "the run never saved"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert last(killed).step < 60
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert_identical(last(straight.path), last(killed))
    assert losses(straight.path) == losses(killed)


@pytest.mark.case("BC048")
@pytest.mark.parametrize("stop", [7, 10, 55])
def test_the_learning_rates_of_a_resumed_run_are_those_of_a_straight_one(
    settings, tmp_path: Path, stop: int
) -> None:
    def rates(path: str | Path) -> list[float]:
        return [line["lr"] for line in read_metrics(Path(path) / "metrics.jsonl") if line["kind"] == "train"]

    cosine = {"schedule": "cosine", "warmup": 10}
    quick = {"save_every": 200, "evaluate_every": 200, "updates": 100, "optimizer": cosine}
    straight = run(settings(out=str(tmp_path / "straight"), **quick))
    s = settings(**quick)
    first = session(s)
    assert [first.schedule(n) for n in range(1, 101)] == rates(straight.path)
    # Stopped by the clock in the middle: what it saves on leaving is where it goes on.
    stopped = settings(**quick)
    original = loop.train_update

    def stopping(current: Session):
        result = original(current)
        if current.progress.update == stop:
            stopped.max_time = 1e-9
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("postil.training.sitting.train_update", stopping)
        assert run(stopped).update == stop
    resumed = run(s, resume="auto")
    assert rates(resumed.path) == rates(straight.path)


@pytest.mark.case("BC071", "BC039")
def test_evaluating_and_sampling_do_not_change_the_training(settings, tmp_path: Path) -> None:
    often = run(settings(out=str(tmp_path / "often"), evaluate_every=1, sample_every=1))
    seldom = run(settings(out=str(tmp_path / "seldom"), evaluate_every=1000, sample_every=0))
    for name, tensor in last(often.path).tensors["model"].items():
        assert torch.equal(tensor, last(seldom.path).tensors["model"][name]), name
    assert losses(often.path) == losses(seldom.path)


@pytest.mark.case("BC039")
def test_evaluation_is_repeatable_and_leaves_the_mode_alone(settings) -> None:
    s = session(settings())
    s.loss.train()
    assert validate(s) == validate(s)
    assert s.model.training
    score, _ = train_update(s)
    again = session(settings())
    assert train_update(again)[0] == score


@pytest.mark.case("BC063", "BC064")
@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_micro_batches_give_the_gradient_of_the_whole_batch(settings, size: int, monkeypatch) -> None:
    def gradients(micro: int | None) -> list[torch.Tensor]:
        s = session(
            settings(
                model={"dropout": 0.0}, optimizer={"batch_size": 10, "micro_batch_size": micro, "clip": 0}
            )
        )
        inputs, targets = s.text.batch(1)
        # Rows of very different numbers of real tokens, as masked losses have.
        targets = targets.clone()
        targets[:5, 3:] = -100
        monkeypatch.setattr(type(s.text), "batch", lambda *_: (inputs, targets))
        captured: list[torch.Tensor] = []
        monkeypatch.setattr(
            s.optimizer, "step", lambda: captured.extend(p.grad.clone() for p in s.model.parameters())
        )
        score, _ = train_update(s)
        assert score.tokens == 5 * 16 + 5 * 3
        return captured

    for whole, parts in zip(gradients(None), gradients(size), strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.case("BC101", "BC102")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_loss_stops_before_the_update(settings, poison: float, monkeypatch) -> None:
    s = settings(updates=60, save_every=10, evaluate_every=10, log_every=7)
    original = loop.NextTokenLoss.forward
    calls = {"count": 0}

    def poisoned(self, ids, targets):
        nats, correct = original(self, ids, targets)
        calls["count"] += self.training
        return (nats * poison if calls["count"] == 30 else nats), correct

    monkeypatch.setattr(loop.NextTokenLoss, "forward", poisoned)
    with pytest.raises(NonFiniteError, match=r"update 30: loss .* gradient norm .* in "):
        run(s)
    kept = last(s.out)
    assert kept.step == 20
    for tensors in kept.tensors.values():
        assert all(tensor.isfinite().all() for tensor in tensors.values())


# The shape checks that run under pytest cannot be traced, so this runs in a process without them. The back
# end is not what is tested.
TRAIN_COMPILED = """
import sys, torch
from postil.cli import main
original = torch.nn.Module.compile
torch.nn.Module.compile = lambda self: original(self, backend="aot_eager")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.case("BC041")
def test_a_compiled_run_saves_plain_names_and_resumes_uncompiled(settings, tmp_path: Path) -> None:
    # Compiled code draws its dropout in an order of its own.
    same = {"optimizer": {"schedule": "constant"}, "model": {"dropout": 0.0}}
    s = settings(updates=5, compile=True, **same)
    record = tmp_path / "settings.json"
    record.write_text(json.dumps(s.to_dict()))
    command = [sys.executable, "-c", TRAIN_COMPILED, "train", f"--config={record}", "--threads=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert s.out is not None
    names = set(last(s.out).tensors["model"])
    assert not [name for name in names if "_orig_mod" in name or "_forward_module" in name]
    straight = run(settings(updates=10, out=str(tmp_path / "straight"), **same))
    resumed = run(settings(updates=10, **same), resume="auto")
    assert losses(resumed.path)[-1][1] == pytest.approx(losses(straight.path)[-1][1], rel=1e-5)
    done = subprocess.run([*command, "--resume=auto", "--updates=12"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert last(s.out).step == 12


@pytest.mark.case("BC043")
def test_tied_weights_stay_tied_through_a_checkpoint(settings) -> None:
    outcome = run(settings(model={"tie_weights": True}))
    model = load_run(outcome.path).model
    assert model.generator.projection.weight is model.embedding.linear.weight
    resumed = run(settings(updates=22, model={"tie_weights": True}), resume="auto")
    assert resumed.update == 22


@pytest.mark.case("BC081")
def test_another_text_is_refused_on_resume_and_sampling_keeps_its_vocabulary(settings, text: Path) -> None:
    outcome = run(settings())
    vocabulary = load_run(outcome.path).tokenizer.to_dict()
    text.write_text("quite another text, with q and z. " * 300)
    with pytest.raises(ValueError, match="another text"):
        run(settings(updates=25), resume="auto")
    assert load_run(outcome.path).tokenizer.to_dict() == vocabulary


def test_other_settings_are_refused_on_resume(settings) -> None:
    run(settings())
    with pytest.raises(ValueError, match=r"cannot be resumed with other settings: optimizer"):
        run(settings(updates=25, optimizer={"lr": 0.5}), resume="auto")
    with pytest.raises(ValueError, match=r"cannot be resumed with other settings: seed"):
        run(settings(updates=25, seed=5), resume="auto")


@pytest.mark.case("BC054")
def test_resume_takes_the_last_good_checkpoint_and_says_so(settings) -> None:
    outcome = run(settings())
    newest = checkpoints.steps(outcome.path / "checkpoints")[-1]
    (newest / "model.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=newest.name):
        resumed = run(settings(updates=25), resume="auto")
    assert resumed.update == 25
    assert [update for update, _ in losses(outcome.path)] == list(range(1, 26))


@pytest.mark.case("BC080")
def test_symbols_that_training_never_shows_are_reported_before_it(settings, text: Path, capsys) -> None:
    from rich.console import Console

    text.write_text(text.read_text() + " ÄÖÜ")
    s = settings()
    outcome = train(s, console=Console(width=200))
    shown = capsys.readouterr().out
    assert "3 symbols that training never shows" in shown and "Ä" in shown
    assert shown.index("never shows") < shown.index("update 10")
    assert outcome.bits is not None and outcome.bits < 100


@pytest.mark.case("BC027", "BC030")
def test_a_sample_longer_than_the_positions_is_written_with_a_warning(settings) -> None:
    with pytest.warns(UserWarning, match="16 positions"):
        run(settings(sample_tokens=30, evaluate_every=20))


def test_learning_rates_follow_their_formulas() -> None:
    rate = noam(1.0, 2000, 256)
    assert rate(1) == pytest.approx(256**-0.5 * 2000**-1.5)
    assert rate(2000) == pytest.approx(256**-0.5 * 2000**-0.5)
    assert rate(8000) == pytest.approx(256**-0.5 * 8000**-0.5)
    with pytest.raises(ValueError, match="warmup=0"):
        noam(1.0, 0, 256)
    rate = warmup_cosine(1.0, 10, 100)
    assert rate(5) == pytest.approx(0.5) and rate(10) == 1.0 and rate(100) == pytest.approx(0.1)
    assert warmup_cosine(1.0, 0, 100)(1) > 0.99
    with pytest.raises(ValueError, match="warmup=200"):
        warmup_cosine(1.0, 200, 100)
    assert constant(2.0)(1) == 2.0 and constant(2.0, 4)(1) == 0.5


def test_decay_uses_the_effective_rate_and_spares_vectors(settings) -> None:
    s = session(settings(optimizer={"schedule": "noam", "lr": 1.0, "warmup": 10, "weight_decay": 0.5}))
    before = {name: p.detach().clone() for name, p in s.model.named_parameters()}
    for p in s.model.parameters():
        p.grad = torch.zeros_like(p)
    loop.set_learning_rate(s.optimizer, s.schedule(1))
    s.optimizer.step()
    rate = s.schedule(1)
    assert rate == pytest.approx(16**-0.5 * 10**-1.5)
    for name, p in s.model.named_parameters():
        kept = 1 - rate * 0.5 if p.dim() >= 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * kept, rtol=1e-6, atol=1e-7)


def test_limits_of_a_run(settings) -> None:
    assert settings(updates=None, max_tokens=640).total_updates(100) == 10
    assert settings(updates=None, epochs=2).total_updates(100) == 200
    assert settings(updates=7, epochs=2).total_updates(100) == 7
    assert settings(updates=None, max_time=5.0).total_updates(100) is None
    with pytest.raises(ValueError, match="nothing would end this run"):
        settings(updates=None).check()
    with pytest.raises(ValueError, match="must know where it ends"):
        settings(updates=None, max_time=5.0).make_schedule(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": "rnn"}, r"mixer='rnn' is not known; there are .*multi-head-attention"),
        ({"updates": 0}, "updates=0 must be above 0"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"optimizer": {"lr": -1.0}}, r"optimizer.lr=-1.0 must not be negative"),
        ({"optimizer": {"batch_size": 4, "micro_batch_size": 5}}, "micro_batch_size=5 exceeds"),
        ({"optimizer": {"schedule": "linear"}}, "optimizer.schedule='linear' is not known"),
        ({"data": {"valid_fraction": 1.0}}, r"valid_fraction=1.0 must lie between 0 and 1"),
        ({"precision": "8"}, "precision='8' is not known"),
        (
            {"devices": 3, "optimizer": {"batch_size": 4}},
            "batch_size=4 must be a multiple of the 3 processes",
        ),
        ({"model": {"dropout": 1.5}}, "dropout=1.5"),
        ({"accelerator": "cuda", "devices": 4}, "this machine has"),
    ],
)
def test_impossible_settings_name_the_value_and_leave_no_folder(
    settings, changes: dict, message: str
) -> None:
    if "accelerator" in changes and torch.cuda.device_count() >= 4:
        pytest.skip("this machine really has four GPUs")
    s = settings(**changes)
    with pytest.raises(ValueError, match=message):
        run(s)
    assert not Path(s.out).exists()


def test_settings_of_another_version_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown settings colour"):
        settings_from_dict({"colour": 1})
    with pytest.raises(ValueError, match=r"unknown settings depth; ModelSettings has"):
        settings_from_dict({"model": {"depth": 1}})


def test_bf16_trains(settings) -> None:
    outcome = run(settings(precision="bf16-mixed"))
    assert outcome.bits is not None and outcome.bits < 4
    assert {t.dtype for t in last(outcome.path).tensors["model"].values()} == {torch.float32}


@pytest.mark.case("BC019")
@pytest.mark.slow
def test_nothing_can_be_learnt_from_noise(tmp_path: Path, settings) -> None:
    """A model that sees its own targets predicts even random tokens; an honest one never beats ln 32."""
    import math
    import random

    noise = tmp_path / "noise.txt"
    symbols = "abcdefghijklmnopqrstuvwxyzABCDEF"
    noise.write_text("".join(random.Random(1).choices(symbols, k=400_000)))
    s = settings(
        text=str(noise), updates=300, sample_every=0, evaluate_every=300, prompt="a", model={"dropout": 0.0}
    )
    outcome = run(s)
    tail = [loss for update, loss in losses(outcome.path) if update > 200]
    assert sum(tail) / len(tail) >= math.log(32) - 0.02


def test_console_is_quiet_when_told(settings, capsys) -> None:
    train(settings(updates=2), console=QUIET)
    assert capsys.readouterr().out == ""

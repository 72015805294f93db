"""Layers computed twice give the same gradient, under the same names; and what a token costs."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from runs import last, run
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from postil.language_model import NextTokenLoss
from postil.registry import ModelSettings, build_language_model
from postil.training.processes import Ended
from postil.training.sharding import recompute_layers, share, whole
from postil.training.speed import flops_per_token, matrix_speed

SIZES = ModelSettings(d_model=16, n_layers=3, heads=2, seq_len=8, dropout=0.1)


# A stack keeps the inputs of its layers alone; a Feedback Transformer all but its probabilities.
@pytest.mark.parametrize(
    ("mixer", "part"), [("multi-head-attention", 0.5), ("feedback", 1.0), ("feedback-original", 1.0)]
)
def test_recomputed_layers_give_the_same_gradients_under_the_same_names(mixer: str, part: float) -> None:
    model = build_language_model(mixer, SIZES, 11)
    other = copy.deepcopy(model)
    recompute_layers(other)
    ids = torch.randint(11, (2, 8))
    kept = []
    for each in (model, other):
        torch.manual_seed(3)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            loss, _ = NextTokenLoss(each)(ids, ids)
        loss.backward()
        kept.append(sum(sizes))
    assert kept[1] < part * kept[0]
    assert list(model.state_dict()) == list(other.state_dict())
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name


def test_what_cannot_be_recomputed_is_refused() -> None:
    model = build_language_model("multi-head-attention", SIZES, 11)
    model.backbone = nn.Identity()
    with pytest.raises(ValueError, match="needs a stack of layers or a Feedback Transformer, not Identity"):
        recompute_layers(model)


def test_whole_and_share_leave_plain_tensors_alone() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    assert whole(tensors) == tensors and whole(tensors, keep=False) == {}
    assert share(tensors, tensors) == tensors


def test_a_run_with_recomputed_layers_is_the_same_run(settings, tmp_path: Path) -> None:
    model = {"dropout": 0.1}
    one = run(settings(out=str(tmp_path / "one"), model=model))
    two = run(settings(out=str(tmp_path / "two"), model=model, activation_checkpointing=True))
    for name, tensor in last(one.path).tensors["model"].items():
        assert torch.equal(tensor, last(two.path).tensors["model"][name]), name


def test_operations_of_a_token_are_those_of_the_linear_layers() -> None:
    model = build_language_model("multi-head-attention", SIZES, 11).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.int64))
    products = counter.get_flop_counts()["Global"]
    counted = sum(n for op, n in products.items() if str(op) in ("aten.mm", "aten.addmm"))
    # A forward pass is a third of the whole.
    assert counted * 3 == flops_per_token(model) * 2 * 8
    assert matrix_speed(torch.device("cpu")) > 1e8


def test_how_a_process_ended_is_said_in_words() -> None:
    assert str(Ended(1, 0, None)) == "rank 1 ended early, with exit code 0"
    assert str(Ended(2, -9, None)) == "rank 2 was killed by SIGKILL; the system does so when memory runs out"
    assert str(Ended(0, -15, None)) == "rank 0 was killed by SIGTERM"


# Shape checks cannot be traced, so these run in processes without them; the compiler's own back end would
# take minutes and is not what is tested.
COMPILED = """
import torch
original = torch.nn.Module.compile
torch.nn.Module.compile = lambda self: original(self, backend="aot_eager")
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "changes",
    [
        {"compile": True},
        {"activation_checkpointing": True, "optimizer": {"micro_batch_size": 1}},
        {"compile": True, "activation_checkpointing": True},
        {"precision": "bf16-mixed", "activation_checkpointing": True},
    ],
    ids=["compile", "recompute", "compile-recompute", "bf16-recompute"],
)
def test_options_work_together_in_two_processes(
    settings, tmp_path: Path, strategy: str, changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(COMPILED if changes.get("compile") else "")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    single = settings(out=str(tmp_path / "single"), precision=changes.get("precision", "32"))
    straight = run(single)
    outcome = run(settings(devices=2, strategy=strategy, **changes))
    tolerance = 2e-2 if "precision" in changes else 1e-5
    assert outcome.bits == pytest.approx(straight.bits, abs=tolerance)
    assert last(outcome.path).tensors["model"].keys() == last(straight.path).tensors["model"].keys()

"""Exported graphs write the model's text at any length, or are not written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from postil.cli import main
from postil.integrations import foreign
from postil.integrations.huggingface import PretrainedModel
from postil.registry import REGISTRY
from postil.sampling import Sampler, generate
from postil.training.saved import load_run

from .making import make_model

PROMPT = [3, 7, 5, 16, 2]
# Its state says how long it is by a number of its own, which a loop in a graph would have to fix.
TOKEN_BY_TOKEN = ("feedback", "feedback-original")


def make_run(mixer, path, **options):
    """Write a run of a small model, and give its greedy text."""
    made = make_model(mixer, **options)
    source = path.with_name("source")
    source.write_text("")
    settings = foreign.ModelSettings(**made._hub_mixin_config["settings"])
    foreign.write_run(path, mixer, settings, made.model.state_dict(), made.tokenizer, source=source)
    return PROMPT + generate(made.model, [PROMPT], tokens=20, sampler=Sampler(0.0))[0].tolist()


# A process of its own, as a user would run it: in this one the checks of shapes would be traced too.
def export(run, to, out):
    command = [sys.executable, "-m", "postil.cli", "export", str(run), "--to", to, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def graph_text(out):
    program = Path(__file__).with_name("run_graphs.py")
    done = subprocess.run(
        [sys.executable, program, out, "20", *map(str, PROMPT)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def exports_and_writes(mixer, to, tmp_path):
    text = make_run(mixer, tmp_path / "run")
    done = export(tmp_path / "run", to, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert graph_text(tmp_path / "out") == text
    described = json.loads((tmp_path / "out" / "export.json").read_text())
    for shape in described["step"]["inputs"].values():
        assert all(isinstance(size, int) or size in ("B", "S") for size in shape)
    assert described["prefill"]["inputs"]["ids"] == ["B", 1 if mixer in TOKEN_BY_TOKEN else "T"]
    if mixer == "multi-head-attention":
        assert described["step"]["inputs"]["state.backbone.0.keys"][:2] == ["S", "B"]


@pytest.mark.case("BC110", "BC111")
@pytest.mark.parametrize("to", ["torch", "onnx"])
def test_attention_is_exported_for_any_length(to, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs onnx, onnxscript and onnxruntime")
    pytest.importorskip("onnxscript", reason="needs onnx, onnxscript and onnxruntime")
    exports_and_writes("multi-head-attention", to, tmp_path)


@pytest.mark.slow
@pytest.mark.case("BC110", "BC111")
@pytest.mark.parametrize("to", ["torch", "onnx"])
@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "multi-head-attention"])
def test_every_model_is_exported_or_says_why_not(name, to, tmp_path):
    pytest.importorskip("onnxscript", reason="needs onnx, onnxscript and onnxruntime")
    pytest.importorskip("onnxruntime", reason="needs onnx, onnxscript and onnxruntime")
    exports_and_writes(name, to, tmp_path)


# A window lets the state forget at a length that the example has not reached: nothing may be written that is
# right only before.
@pytest.mark.parametrize(
    ("mixer", "reason"),
    [
        ("multi-head-attention", "backbone.0.start in its state is"),
        ("feedback", "backbone.stop in its state is"),
    ],
)
def test_a_model_that_cannot_be_exported_says_so(mixer, reason, tmp_path):
    make_run(mixer, tmp_path / "run", options={"window": 4})
    done = export(tmp_path / "run", "torch", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{mixer} cannot be exported to torch: {reason}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_becomes_a_model_of_the_hub(mixer, tmp_path, capsys):
    make_run(mixer, tmp_path / "run")
    command = ["export", str(tmp_path / "run"), "--to", "huggingface", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    ids = torch.tensor([PROMPT])
    expected = load_run(tmp_path / "run").model(ids)
    assert torch.equal(PretrainedModel.from_pretrained(tmp_path / "out")(ids), expected)
    capsys.readouterr()
    assert main(command) == 2
    assert "not an empty folder" in capsys.readouterr().err

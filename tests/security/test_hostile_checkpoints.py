r"""A stranger's checkpoint, in every slot that is read, given to every command that reads one."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from postil.cli import COMMANDS, main
from postil.training import checkpoints, manifest


class Payload:
    r"""Makes a marker when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return (os.mkdir, (self.marker,))


@pytest.fixture
def marker(tmp_path: Path):
    place = tmp_path / "marker"
    yield place
    assert not place.exists(), "a payload ran"


# A seal proves nothing about who made it, so the attacker seals too.
def reseal(checkpoint: Path) -> None:
    content = json.loads((checkpoint / manifest.MANIFEST).read_text())
    content.pop("sha256")
    for name in content["files"]:
        size, digest = checkpoints.tensor_files.size_and_digest(checkpoint / name)
        content["files"][name] = {"size": size, "sha256": digest}
    (checkpoint / manifest.MANIFEST).write_bytes(manifest._sealed(content))


def commands(run: Path, tmp_path: Path) -> dict[str, list[str]]:
    r"""Every command that opens a run or a checkpoint."""
    out = tmp_path / "out"
    every = {
        "sample": ["sample", str(run), "--tokens=1"],
        "sample of a checkpoint": ["sample", str(newest(run)), "--tokens=1"],
        "resume": ["train", f"--out={run}", "--resume=auto", "--updates=4"],
        "resume from": ["train", f"--out={run}", f"--resume={newest(run)}", "--updates=4"],
        "export": ["export", str(run), "--to=torch", f"--out={out}"],
    }
    if "compare" in COMMANDS:
        every["compare"] = ["compare", str(run), str(run)]
    return every


def newest(run: Path) -> Path:
    return checkpoints.steps(run / "checkpoints")[-1]


def zipped(payload: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/version", "3")
    return file.getvalue()


SLOTS = ["model.safetensors", "optimizer.safetensors", "metadata.json", "manifest.json", ".metadata"]


@pytest.mark.case("BC059", "BC061")
@pytest.mark.parametrize(
    "form", [pickle.dumps, lambda value: zipped(pickle.dumps(value))], ids=["pickle", "zip"]
)
@pytest.mark.parametrize("slot", SLOTS)
def test_a_payload_in_any_slot_runs_in_no_command(trained, tmp_path, marker, capsys, slot, form) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    payload = form({"model": Payload(marker)})
    checkpoint = newest(run)
    if slot == ".metadata":
        for file in checkpoint.iterdir():
            file.unlink()
        (checkpoint / "__0_0.distcp").write_bytes(payload)
    (checkpoint / slot).write_bytes(payload)
    if slot in ("model.safetensors", "optimizer.safetensors", "metadata.json"):
        reseal(checkpoint)
    for name, command in commands(run, tmp_path).items():
        capsys.readouterr()
        # Nothing but training reads the optimizer's file.
        if slot == "optimizer.safetensors" and "resume" not in name:
            continue
        code, said = main(command), capsys.readouterr().err
        assert code == 2, (name, said)
        assert "Traceback" not in said and "weights_only" not in said, name
    assert main(["info", str(run)]) == 0


@pytest.mark.case("BC059")
@pytest.mark.parametrize("form", ["pickle", "torch", "zip", "model", "nested"])
@pytest.mark.parametrize("kind", ["nanogpt", "labml"])
def test_a_payload_in_a_checkpoint_of_others_is_not_imported(tmp_path, marker, refused, kind, form) -> None:
    file, text = tmp_path / "model.pt", tmp_path / "text.txt"
    text.write_text("abc" * 50)
    payload = Payload(marker)
    if form == "pickle":
        file.write_bytes(pickle.dumps(payload))
    elif form == "zip":
        file.write_bytes(zipped(pickle.dumps(payload)))
    elif form == "model":
        torch.save(torch.nn.Linear(2, 2), file)
    else:
        torch.save(
            {"model": {"weight": torch.ones(2)}, "rest": payload if form == "torch" else [[payload]]}, file
        )
    said = refused("import", kind, str(file), f"--text={text}", f"--out={tmp_path / 'run'}")
    assert "cannot be read as weights" in said and "weights_only" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl", "run.lock"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"settings": 1}', b"null\n[]\n1\n", pickle.dumps([1])]
)
def test_files_beside_the_checkpoints_are_data_too(trained, tmp_path, capsys, file, content) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / file).write_bytes(content)
    for command in (["info", str(run)], ["train", f"--out={run}", "--resume=auto", "--updates=2"]):
        assert main(command) in (0, 2)
        said = capsys.readouterr().err
        assert "Traceback" not in said


# Nothing of the size that a settings file claims may be made before the tensors vouch for it.
@pytest.mark.parametrize(
    "change",
    [
        {"model": {"d_model": 2**40, "heads": 1}},
        {"model": {"n_layers": 10**9}},
        {"model": {"seq_len": 2**40}},
        {"model": {"d_model": "8"}},
        {"model": {"options": {"no_such": 1}}},
        {"mixer": "../../x"},
        {"mixer": ["multi-head-attention"]},
        {"prompt": 5},
        {"model": None},
    ],
)
def test_settings_that_lie_are_refused(trained, tmp_path, refused, change) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    file = newest(run) / "metadata.json"
    metadata = json.loads(file.read_text())
    for key, value in change.items():
        old = metadata["settings"][key]
        metadata["settings"][key] = {**old, **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(metadata))
    reseal(newest(run))
    assert str(newest(run)) in refused("sample", str(run), "--tokens=1")


@pytest.mark.parametrize(
    "tokenizer",
    [
        None,
        [],
        {},
        {"kind": "os.system"},
        {"kind": "characters"},
        {"kind": "characters", "symbols": 5},
        {"kind": "characters", "alphabet": ["a" * 10]},
    ],
)
def test_a_vocabulary_that_is_none_is_refused(trained, tmp_path, refused, tokenizer) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    file = newest(run) / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer": tokenizer}))
    reseal(newest(run))
    refused("sample", str(run), "--tokens=1")

r"""What a stranger's checkpoint may try: run commands, name other files, promise more than it holds."""

import ast
import json
import os
import resource
import struct
from pathlib import Path

import pytest
import torch

from postil.training import checkpoints, manifest
from postil.training.checkpoints import CheckpointError, CheckpointWarning


def save(directory, step):
    return checkpoints.save(directory, step, {"model": {"a": torch.ones(3)}}, {})


# Each payload makes a marker if it is ever unpickled.
class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def pickles(marker):
    import pickle

    return pickle.dumps({"model": Payload(marker)})


@pytest.mark.case("BC059")
def test_no_pickle_is_ever_read(tmp_path):
    marker = tmp_path / "marker"
    payload = pickles(marker)
    whole = tmp_path / "model.pt"
    whole.write_bytes(payload)
    torch.save({"model": Payload(marker)}, tmp_path / "zip.ckpt")
    for path in (whole, tmp_path / "zip.ckpt"):
        with pytest.raises(CheckpointError, match="pickles, which can run commands"):
            checkpoints.find(tmp_path, path)
    for file in ("model.safetensors", "metadata.json", "manifest.json"):
        for verify in (True, False):
            path = save(tmp_path / file / str(verify), 1)
            (path / file).write_bytes(payload)
            reseal(path)
            with pytest.raises(CheckpointError, match=file) as caught:
                checkpoints.load(path, verify=verify)
            assert "\n" not in str(caught.value)
            with pytest.raises(CheckpointError):
                checkpoints.latest(path.parent)
    assert not marker.exists()
    # The payload is live: unpickling it does make the marker.
    import pickle

    pickle.loads(payload)
    assert marker.exists()


@pytest.mark.case("BC061")
def test_a_distributed_checkpoint_is_refused_unread(tmp_path):
    marker = tmp_path / "marker"
    for step in (10, 20):
        path = save(tmp_path, step)
    for file in path.iterdir():
        file.unlink()
    (path / ".metadata").write_bytes(pickles(marker))
    (path / "__0_0.distcp").write_bytes(pickles(marker))
    with pytest.raises(
        CheckpointError, match=r"torch.distributed.checkpoint folder, whose .metadata is a pickle"
    ):
        checkpoints.load(path)
    with pytest.warns(CheckpointWarning, match="step-00000020"):
        assert checkpoints.latest(tmp_path).step == 10
    assert not marker.exists()


def unsafe_calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from ({"pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"} & set(modules))
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if call in {
                "eval",
                "exec",
                "yaml.load",
                "yaml.unsafe_load",
                "yaml.full_load",
                "pickle.loads",
                "dcp.load",
            }:
                yield call
            if call == "torch.load" and options.get("weights_only") != "True":
                yield "torch.load without weights_only=True"


def test_the_package_has_no_unsafe_loader():
    package = Path(checkpoints.__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        assert not list(unsafe_calls(ast.parse(path.read_text(encoding="utf-8")))), path
    loads = "torch.load(f)\ntorch.load(f, weights_only=False)\nyaml.load(f)"
    bad = f"import pickle\n{loads}\neval('1')\nmodel.eval()"
    assert len(list(unsafe_calls(ast.parse(bad)))) == 5


# What somebody who knows the format could write: a valid seal around changed content.
def reseal(path, **changes):
    files = {
        each.name: manifest_entry(each)
        for each in path.iterdir()
        if each.name != manifest.MANIFEST and each.is_file()
    }
    content = {
        "format": manifest.FORMAT,
        "step": 1,
        "best": False,
        "files": files,
        "groups": {"model": ["model.safetensors"]},
        "tied": {},
    }
    if (path / manifest.MANIFEST).read_bytes().startswith(b"{"):
        (path / manifest.MANIFEST).write_bytes(manifest._sealed({**content, **changes}))


def manifest_entry(path):
    size, digest = checkpoints.tensor_files.size_and_digest(path)
    return {"size": size, "sha256": digest}


@pytest.mark.case("BC134")
@pytest.mark.parametrize(
    "name", ["../../etc/hostname", "/etc/hostname", "a/../../x", "..", ".hidden", "", "a\x00b"]
)
def test_a_manifest_cannot_name_files_outside(tmp_path, name):
    path = save(tmp_path, 1)
    entry = manifest_entry(path / "metadata.json")
    files = {
        "metadata.json": entry,
        name: manifest_entry(Path("/etc/hostname")) if name[:1] == "/" else entry,
    }
    reseal(path, files=files, groups={"model": [name]})
    with pytest.raises(CheckpointError, match=r"file .*: expected 1 to 100 of the characters"):
        checkpoints.load(path)
    with pytest.raises(ValueError, match="group"):
        checkpoints.save(tmp_path, 2, {name: {}}, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "1"},
        {"step": True},
        {"step": -1},
        {"best": 1},
        {"files": []},
        {"files": {}},
        {"files": {"metadata.json": {"size": -1, "sha256": ""}}},
        {"files": {"metadata.json": {"size": 2}}},
        {"files": {"metadata.json": None}},
        {"groups": {"model": ["other.safetensors"]}},
        {"groups": {"model": "model.safetensors"}},
        {"groups": {"model": [["x"]]}},
        {"tied": {"model": {"a": 1}}},
        {"tied": {"model": {"a": "b"}}},
        {"tied": None},
        {"format": 0},
        {"format": "1"},
        {"format": None},
    ],
)
def test_a_sealed_manifest_is_still_checked(tmp_path, changes):
    path = save(tmp_path, 1)
    reseal(path, **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoints.load(path)


def test_files_must_be_regular_files(tmp_path):
    path = save(tmp_path, 1)
    weights = path / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a regular file"):
        checkpoints.load(path)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a regular file"):
        checkpoints.load(path)


def header(entries, length=None):
    text = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    return struct.pack("<Q", len(text) if length is None else length) + text


TERABYTE = 2**40
LIES = {
    "a terabyte in the shape": header(
        {"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, TERABYTE]}}
    ),
    "shape beyond its bytes": header({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 4]}})
    + b"1234",
    "shape that overflows": header({"a": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 0]}}),
    "header longer than the file": header({}, TERABYTE),
    "header of 2**63": header({}, 2**63),
    "nested 5 million deep": header(b'{"a":' + b"[" * 5_000_000),
    "overlapping tensors": header(
        {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in ("a", "b")}
    )
    + b"1234",
    "unknown element type": header({"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 4]}}) + b"1234",
    "bytes left over": header({}) + b"1234",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_tensor_file_is_refused_and_allocates_nothing(tmp_path, lie):
    path = save(tmp_path, 1)
    (path / "model.safetensors").write_bytes(LIES[lie])
    reseal(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"model.safetensors: damaged"):
        checkpoints.load(path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 2 * len(LIES[lie]) + 2**25


@pytest.mark.parametrize("file", ["metadata.json", "manifest.json"])
@pytest.mark.parametrize(
    "text", [b'{"a":' * 2_000_000, b"[" * 10_000_000, b"[]", b"", b"\xff\xfe", b'{"step": 1']
)
def test_json_that_is_no_small_object_is_refused(tmp_path, file, text):
    path = save(tmp_path, 1)
    (path / file).write_bytes(text)
    if file == "metadata.json":
        reseal(path)
    with pytest.raises(CheckpointError, match=file):
        checkpoints.load(path)


def test_a_manifest_of_a_gigabyte_is_not_read(tmp_path):
    path = save(tmp_path, 1)
    os.truncate(path / "manifest.json", 2**40)
    with pytest.raises(CheckpointError, match=r"manifest.json: has 1099511627776 bytes, more than"):
        checkpoints.load(path)

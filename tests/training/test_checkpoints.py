import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch

from postil.training import checkpoints, manifest
from postil.training.checkpoints import CheckpointError, CheckpointWarning

torch.set_num_threads(1)

GOLDEN = Path(__file__).parents[1] / "data" / "checkpoint-format-1"


def group(step=0):
    generator = torch.Generator().manual_seed(step)
    return {
        "embedding.weight": torch.randn(5, 3, generator=generator),
        "count": torch.tensor(step),
        "half": torch.randn(4, generator=generator).bfloat16(),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
    }


def save(directory, step, **options):
    return checkpoints.save(directory, step, {"model": group(step)}, {"step": step}, **options)


def same(left, right):
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and torch.equal(left[k], right[k]) for k in left
    )


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_what_was_saved_comes_back(tmp_path):
    metadata = {"best": float("inf"), "nested": {"a": [1, 2.5, None, "ü"]}}
    path = checkpoints.save(tmp_path / "new" / "folder", 10, {"model": group(1), "other": {}}, metadata)
    assert path.name == "step-00000010"
    assert names(path) == ["manifest.json", "metadata.json", "model.safetensors", "other.safetensors"]
    checkpoint = checkpoints.load(path)
    assert (checkpoint.step, checkpoint.metadata, checkpoint.path) == (10, metadata, path)
    assert same(checkpoint.tensors["model"], group(1)) and checkpoint.tensors["other"] == {}
    assert same(safetensors.torch.load_file(path / "model.safetensors"), group(1))


def test_only_some_groups_are_read(tmp_path):
    path = checkpoints.save(tmp_path, 1, {"model": group(), "optimizer": group(1)}, {})
    (path / "optimizer.safetensors").write_bytes(b"damaged")
    assert set(checkpoints.load(path, groups=["model"]).tensors) == {"model"}
    with pytest.raises(CheckpointError, match="no group 'models'; it has model, optimizer"):
        checkpoints.load(path, groups=["models"])


def test_files_may_be_read_by_whom_the_folder_allows(tmp_path):
    before = os.umask(0o027)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {oct(each.stat().st_mode & 0o777) for each in path.iterdir()} == {"0o640"}


def test_views_of_one_buffer_are_values_of_their_own(tmp_path):
    buffer = torch.arange(12.0)
    tensors = {"left": buffer[:6], "right": buffer[6:], "square": buffer.view(3, 4).T, "all": buffer}
    loaded = checkpoints.load(checkpoints.save(tmp_path, 1, {"model": tensors}, {})).tensors["model"]
    assert same(loaded, tensors)
    loaded["left"].zero_()
    assert torch.equal(loaded["all"], buffer)


@pytest.mark.case("BC043")
def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    model = Tied()
    path = checkpoints.save(tmp_path, 1, {"model": model.state_dict()}, {})
    assert list(safetensors.torch.load_file(path / "model.safetensors")) == ["embedding.weight"]
    tensors = checkpoints.load(path).tensors["model"]
    assert tensors["head.weight"] is tensors["embedding.weight"]
    again = Tied()
    again.load_state_dict(tensors)
    for each in (model, again):
        each(torch.arange(7)).logsumexp(-1).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert again.head.weight is again.embedding.weight
    assert sum(p.numel() for p in again.parameters()) == 28
    assert torch.equal(again.head.weight, model.head.weight)


@pytest.mark.case("BC041")
def test_names_of_wrappers_are_not_saved(tmp_path):
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    compiled = torch.compile(inner)
    inside = torch.nn.Sequential(torch.compile(inner[0]), inner[1])
    parallel = {f"_forward_module.module._orig_mod.{k}": v for k, v in inner.state_dict().items()}
    for step, state in enumerate([compiled.state_dict(), inside.state_dict(), parallel, inner.state_dict()]):
        path = checkpoints.save(tmp_path, step, {"model": state}, {}, keep=9)
        loaded = checkpoints.load(path).tensors["model"]
        assert same(loaded, inner.state_dict())
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)).load_state_dict(loaded)


def test_a_part_called_module_keeps_its_name(tmp_path):
    tensors = {"layer.module.weight": torch.ones(2), "module.weight": torch.zeros(2), "head": torch.ones(1)}
    assert same(checkpoints.load(checkpoints.save(tmp_path, 1, {"m": tensors}, {})).tensors["m"], tensors)
    with pytest.raises(ValueError, match=r"several tensors are called \['w'\]"):
        checkpoints.save(tmp_path, 2, {"m": {"w": torch.ones(1), "_orig_mod.w": torch.zeros(1)}}, {})
    assert names(tmp_path) == ["step-00000001"]


def test_keeps_the_last_and_the_best(tmp_path):
    for step in (5, 10, 15, 20, 25):
        save(tmp_path, step, keep=2, best=step in (5, 10))
    assert names(tmp_path) == ["step-00000010", "step-00000020", "step-00000025"]
    assert checkpoints.find(tmp_path, "best").step == 10
    assert checkpoints.find(tmp_path).step == 25
    assert checkpoints.find(tmp_path, "step-00000020").step == 20
    assert checkpoints.find(tmp_path, tmp_path / "step-00000020").step == 20
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        checkpoints.find(tmp_path, "step-00000021")


def test_nothing_saved_yet(tmp_path):
    assert checkpoints.latest(tmp_path) is None
    assert checkpoints.find(tmp_path / "missing") is None
    with pytest.raises(CheckpointError, match="no checkpoint is marked as the best"):
        checkpoints.find(tmp_path, "best")


@pytest.mark.parametrize("bad", [{"step": -1}, {"step": 1, "keep": 0}])
def test_bad_numbers_are_refused(tmp_path, bad):
    with pytest.raises(ValueError, match="expected"):
        checkpoints.save(tmp_path / "x", tensors={"model": group()}, metadata={}, **bad)
    assert not (tmp_path / "x").exists()


def test_the_same_step_again_replaces_the_first(tmp_path):
    save(tmp_path, 1)
    checkpoints.save(tmp_path, 1, {"model": group(7)}, {"second": True})
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoints.latest(tmp_path).metadata == {"second": True}


def test_a_crash_between_the_two_renames_still_finds_one(tmp_path):
    path = save(tmp_path, 1)
    path.rename(tmp_path / "step-00000001.old")
    assert checkpoints.latest(tmp_path).step == 1
    save(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]


def test_a_step_reached_again_after_damage_sets_the_damaged_one_aside(tmp_path):
    path = save(tmp_path, 1)
    (path / "manifest.json").write_bytes(b"")
    with pytest.warns(CheckpointWarning, match="moved to"):
        save(tmp_path, 1)
    kept = [name for name in names(tmp_path) if ".aside-" in name]
    assert len(kept) == 1 and checkpoints.latest(tmp_path).step == 1


def test_later_checkpoints_are_not_counted_and_can_be_discarded(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "step-00000030" / "notes.txt").write_text("mine")
    save(tmp_path, 12, keep=1)
    assert names(tmp_path) == ["step-00000012", "step-00000020", "step-00000030"]
    with pytest.warns(CheckpointWarning, match="files of others"):
        assert len(checkpoints.discard_later(tmp_path, 12)) == 2
    assert checkpoints.latest(tmp_path).step == 12
    assert [p.read_text() for p in tmp_path.glob("*.aside-*/notes.txt")] == ["mine"]


def test_what_we_did_not_make_is_never_removed(tmp_path):
    foreign = tmp_path / "step-00000000"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("mine")
    (tmp_path / "step-00000001.bak").write_text("mine")
    save(tmp_path, 1)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    for step in range(2, 6):
        save(tmp_path, step, keep=1)
    assert names(tmp_path) == ["step-00000000", "step-00000001", "step-00000001.bak", "step-00000005"]
    assert (
        (foreign / "thesis.txt").read_text()
        == (tmp_path / "step-00000001" / "notes.txt").read_text()
        == "mine"
    )


@pytest.mark.case("BC056")
def test_leftovers_of_dead_processes_go_and_foreign_files_stay(tmp_path):
    code = (
        "import sys, pathlib; from postil import durable\n"
        "p = pathlib.Path(sys.argv[1])\n"
        "durable.temporary_beside(p / 'step-00000001').mkdir()\n"
        "(durable.temporary_beside(p / 'run.json')).write_text('half')\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    stale = [path for path in tmp_path.iterdir()]
    assert len(stale) == 2
    ours = manifest.durable.temporary_beside(tmp_path / "step-00000009")
    ours.mkdir()
    reused = tmp_path / ours.name.replace(f"~{manifest.durable.process_start(os.getpid())}~", "~1~")
    reused.mkdir()
    elsewhere = tmp_path / ".postil-x~another-machine~1~1~00000000"
    foreign = [tmp_path / ".tmp-step-1", tmp_path / ".postil-x", tmp_path / "step-1.tmp", elsewhere]
    for path in foreign:
        path.write_text("not ours")
    save(tmp_path, 10)
    assert not any(path.exists() for path in stale)
    assert ours.exists() and all(path.exists() for path in foreign)
    assert not reused.exists() or not sys.platform.startswith("linux")
    manifest.durable.remove_leftovers(tmp_path, exclusive=True)
    assert ours.exists() and not elsewhere.exists()


@pytest.mark.case("BC054")
@pytest.mark.parametrize("damage", ["missing", "short", "no manifest", "renamed"])
def test_a_damaged_newest_is_skipped_by_name_and_refused_when_asked_for(tmp_path, damage):
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    if damage == "missing":
        (newest / "model.safetensors").unlink()
    elif damage == "short":
        os.truncate(newest / "model.safetensors", 40)
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        newest = newest.rename(tmp_path / "step-00000030")
    with pytest.warns(CheckpointWarning, match=newest.name) as caught:
        assert checkpoints.latest(tmp_path).step == 10
    assert len(caught) == 1
    if damage != "renamed":
        with pytest.raises(CheckpointError, match=newest.name):
            checkpoints.find(tmp_path, newest)


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    (save(tmp_path, 10) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of 1 checkpoints can be read"):
        checkpoints.latest(tmp_path)


# The file was written by the first release; it must never be written again.
@pytest.mark.case("BC045")
def test_the_first_release_is_readable_for_ever():
    checkpoint = checkpoints.load(GOLDEN)
    recorded = json.loads((GOLDEN.parent / "checkpoint-format-1.json").read_text())
    model, expected = checkpoint.tensors["model"], recorded["logits"]
    assert (checkpoint.step, checkpoint.best) == (12, True)
    assert checkpoint.metadata == recorded["metadata"]
    assert model["head.weight"] is model["embedding.weight"]
    x = model["embedding.weight"] @ model["layer.weight"].T + model["layer.bias"]
    torch.testing.assert_close(x @ model["head.weight"].T, torch.tensor(expected), rtol=0, atol=1e-6)
    assert checkpoint.tensors["random"]["torch"].dtype == torch.uint8


@pytest.mark.case("BC045")
@pytest.mark.parametrize("sealed", [True, False])
def test_a_newer_format_is_refused_with_both_numbers(tmp_path, monkeypatch, sealed):
    save(tmp_path, 10)
    if sealed:
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "FORMAT", 3)
            path = save(tmp_path, 20)
    else:
        path = save(tmp_path, 20)
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"format": 1', '"format": 3'))
    with pytest.raises(
        CheckpointError, match=r"format 3, written by Postil '.+'; Postil '.+' reads formats up to 1"
    ):
        checkpoints.load(path)
    if sealed:
        # Taking an older one silently would throw away what the newer release trained.
        with pytest.raises(CheckpointError, match="format 3"):
            checkpoints.latest(tmp_path)
        assert path.exists()


def test_a_path_that_is_a_file_where_a_directory_should_be(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"checkpoints/step-00000001: cannot save the checkpoint: "):
        save(tmp_path / "checkpoints", 1)
    with pytest.raises(CheckpointError, match="checkpoints: Not a directory"):
        checkpoints.latest(tmp_path / "checkpoints")


def test_metadata_that_is_no_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError):
        checkpoints.save(tmp_path, 1, {"model": group()}, {"a": torch.ones(1)})
    assert names(tmp_path) == []


def test_loading_says_nothing_when_nothing_is_wrong(tmp_path):
    save(tmp_path, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(checkpoints.latest(tmp_path).tensors["model"], group(1))

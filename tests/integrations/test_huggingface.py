"""Models go to the Hub's form and come back exactly; nothing else is read."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from postil.integrations import huggingface
from postil.integrations.huggingface import PretrainedModel

from .making import make_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["learned", "fixed", "none"])
def test_a_saved_model_comes_back_exactly(mixer, tied, positions, tmp_path):
    model = make_model(mixer, tie_weights=tied, positions=positions)
    model.save_pretrained(tmp_path)
    again = PretrainedModel.from_pretrained(tmp_path)
    ids = torch.randint(0, 17, (2, 9))
    assert torch.equal(model(ids), again(ids))
    assert again.tokenizer.decode(again.tokenizer.encode("a bed.")) == "a bed."
    assert not again.training


@pytest.mark.case("BC043")
def test_tied_weights_are_stored_once_and_stay_tied(mixer, tmp_path):
    model = make_model(mixer, tie_weights=True)
    model.save_pretrained(tmp_path)
    again = PretrainedModel.from_pretrained(tmp_path).model
    assert again.generator.projection.weight is again.embedding.linear.weight
    count = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in again.parameters()) == count
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * count + 20_000
    optimizer = torch.optim.SGD(again.parameters(), lr=1.0)
    again(torch.tensor([[1, 2, 3]])).square().sum().backward()
    optimizer.step()
    assert torch.equal(again.generator.projection.weight, again.embedding.linear.weight)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.case("BC059")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "config.json"])
def test_a_pickle_is_never_read(name, tmp_path):
    marker = tmp_path / "marker"
    folder = tmp_path / "model"
    make_model("multi-head-attention").save_pretrained(folder)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps({"model": Payload(marker)}))
    with pytest.raises(ValueError) as caught:
        PretrainedModel.from_pretrained(folder)
    if name != "config.json":
        assert "refused" in str(caught.value) or "cannot be read" in str(caught.value)
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists()


def test_what_does_not_fit_is_named(tmp_path):
    make_model("multi-head-attention").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def rewritten(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return pytest.raises(ValueError)

    with rewritten(settings={**config["settings"], "colour": 3}) as caught:
        PretrainedModel.from_pretrained(tmp_path)
    assert "colour" in str(caught.value)
    with rewritten(settings={**config["settings"], "n_layers": 2}) as caught:
        PretrainedModel.from_pretrained(tmp_path)
    assert "layers.1" in str(caught.value)
    with rewritten(mixer="nonsense") as caught:
        PretrainedModel.from_pretrained(tmp_path)
    assert "nonsense" in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks mixer, settings, tokenizer"):
        PretrainedModel.from_pretrained(tmp_path)


# A sparse file takes no room on the disk; whoever read it whole would need a terabyte.
def test_a_config_is_measured_before_it_is_read(tmp_path):
    make_model("multi-head-attention").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    os.truncate(config, 10**12)
    with pytest.raises(ValueError, match=r"config\.json: has 1000000000000 bytes, more than the \d+ allowed"):
        PretrainedModel.from_pretrained(tmp_path)
    os.truncate(config, 0)
    config.write_text('{"mixer": ' + "[" * 200_000)
    with pytest.raises(ValueError, match=r"config\.json: nested too deeply"):
        PretrainedModel.from_pretrained(tmp_path)


# A billion layers would be built one by one, before anybody missed their tensors.
@pytest.mark.parametrize("name", ["n_layers", "d_model", "d_ff", "seq_len"])
def test_claims_that_the_weights_cannot_back_build_nothing(name, tmp_path):
    make_model("multi-head-attention").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["settings"][name] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{name}=1000000000, and") as caught:
        PretrainedModel.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_repository_is_read_as_a_folder_is(tmp_path, monkeypatch):
    from huggingface_hub.errors import EntryNotFoundError

    model = make_model("multi-head-attention")
    model.save_pretrained(tmp_path)
    asked = []

    def download(repository, name, **options):
        asked.append((repository, name, options))
        if not (tmp_path / name).exists():
            raise EntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface, "hf_hub_download", download)
    ids = torch.randint(0, 17, (2, 9))
    again = PretrainedModel.from_pretrained("someone/small", revision="v1")
    assert torch.equal(model(ids), again(ids))
    assert asked == [
        ("someone/small", name, {"revision": "v1"}) for name in ("config.json", "model.safetensors")
    ]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"someone/small: has no model\.safetensors"):
        PretrainedModel.from_pretrained("someone/small")


def test_push_uploads_what_save_writes(tmp_path, monkeypatch):
    import huggingface_hub.hub_mixin as hub

    sent = {}

    class Api:
        def __init__(self, token):
            pass

        def create_repo(self, repo_id, **options):
            return type("Repo", (), {"repo_id": repo_id})

        def upload_folder(self, *, folder_path, **options):
            sent.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
            return "done"

    monkeypatch.setattr(hub, "HfApi", Api)
    model = make_model("multi-head-attention")
    assert model.push_to_hub("someone/small") == "done"
    model.save_pretrained(tmp_path)
    for name in ("model.safetensors", "config.json", "tokenizer_config.json"):
        assert sent[name] == (tmp_path / name).read_bytes()

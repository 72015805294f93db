"""Models of labml-nn and of nanoGPT come in with their logits; no code comes in with them."""

import json
import math
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from postil.cli import main
from postil.training.saved import load_run

PEERS = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
ALPHABET = "\n abcdefghijklmnopqrstuvw."
VOCAB = len(ALPHABET)


# GPT-2 as nanoGPT computes it: one map for query, key and value, embeddings unscaled, output tied to them.
class Block(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width, bias=bias), "c_proj": nn.Linear(width, width, bias=bias)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias=bias), "c_proj": nn.Linear(4 * width, width, bias=bias)}
        )

    def forward(self, x):
        q, k, v = self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + self.attn["c_proj"](y.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class SmallGPT(nn.Module):
    def __init__(self, width=12, heads=3, layers=2, block=16, bias=True):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, width),
                "wpe": nn.Embedding(block, width),
                "h": nn.ModuleList(Block(width, heads, bias) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width, bias=bias),
            }
        )
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)

    def forward(self, ids):
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


def saved(gpt, path, prefix="", **changes):
    arguments = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 16, "dropout": 0.0}
    torch.save(
        {
            "model": {prefix + name: tensor for name, tensor in gpt.state_dict().items()},
            "optimizer": torch.optim.AdamW(gpt.parameters()).state_dict(),
            "model_args": arguments,
            "iter_num": 2000,
            "best_val_loss": torch.tensor(1.5),
            "config": {"dataset": "shakespeare_char"},
            **changes,
        },
        path,
    )


@pytest.fixture
def alphabet(tmp_path):
    path = tmp_path / "alphabet.json"
    path.write_text(json.dumps(list(ALPHABET)))
    return str(path)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_nanogpt_checkpoint_has_its_logits(bias, prefix, tmp_path, alphabet, capsys):
    gpt = SmallGPT(bias=bias).eval()
    saved(gpt, tmp_path / "ckpt.pt", prefix)
    out = str(tmp_path / "run")
    assert main(["import", "nanogpt", str(tmp_path / "ckpt.pt"), "--out", out, "--alphabet", alphabet]) == 0
    run = load_run(out)
    ids = torch.randint(0, VOCAB, (3, 16))
    torch.testing.assert_close(run.model(ids), gpt(ids), rtol=0, atol=1e-5)
    capsys.readouterr()
    assert main(["sample", out, "--prompt", "a bed", "--tokens", "6", "--temperature", "0"]) == 0
    ids = torch.from_numpy(run.tokenizer.encode("a bed").astype("int64"))[None]
    for _ in range(6):
        ids = torch.cat([ids, gpt(ids)[:, -1:].argmax(-1)], 1)
    assert capsys.readouterr().out == run.tokenizer.decode(ids[0].tolist()) + "\n"
    assert main(["info", out]) == 0
    assert "nanogpt" not in capsys.readouterr().err


def test_the_text_gives_the_alphabet(tmp_path):
    saved(SmallGPT(), tmp_path / "ckpt.pt")
    (tmp_path / "input.txt").write_text(ALPHABET[::-1] * 3)
    command = ["import", "nanogpt", str(tmp_path / "ckpt.pt"), "--out", str(tmp_path / "run"), "--text"]
    assert main([*command, str(tmp_path / "input.txt")]) == 0
    assert load_run(tmp_path / "run").tokenizer.decode(range(VOCAB)) == "".join(sorted(ALPHABET))


def test_what_is_not_nanogpts_is_named(tmp_path, alphabet, capsys):
    gpt = SmallGPT()
    state = gpt.state_dict()

    def refused(message, state=state, **changes):
        saved(gpt, tmp_path / "ckpt.pt", **{"model": state, **changes})
        out = tmp_path / "run"
        command = ["import", "nanogpt", str(tmp_path / "ckpt.pt"), "--out", str(out), "--alphabet", alphabet]
        assert main(command) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not out.exists()

    attn = "transformer.h.0.attn.c_attn.weight"
    refused("stored transposed", {**state, attn: state[attn].T.contiguous()})
    refused("lacks 'wpe.weight'", {n: t for n, t in state.items() if "wpe" not in n})
    refused("which no model of nanoGPT's has", {**state, "transformer.h.0.attn.rotary": torch.ones(2)})
    refused("how many heads", model_args={})
    refused("d_model=12", model_args={"n_head": 5})
    refused("holds no state dict", [1, 2, 3])
    small = {
        "transformer.wte.weight": state["transformer.wte.weight"][:9],
        "lm_head.weight": torch.ones(9, 12),
    }
    refused("is of 9 tokens, the vocabulary given has 26", {**state, **small})


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.case("BC059")
@pytest.mark.parametrize("kind", ["nanogpt", "labml"])
def test_no_code_of_a_checkpoint_is_run(kind, tmp_path, alphabet, capsys):
    marker = tmp_path / "marker"
    zipped, plain, inside = (tmp_path / name for name in ("zip.pt", "plain.pt", "inside.pt"))
    torch.save({"model": Payload(marker)}, zipped)
    plain.write_bytes(pickle.dumps({"model": Payload(marker)}))
    saved(SmallGPT(), inside, config=Payload(marker))
    for path in (zipped, plain, inside):
        out = tmp_path / "run"
        assert main(["import", kind, str(path), "--out", str(out), "--alphabet", alphabet]) == 2
        error = capsys.readouterr().err
        assert "cannot be read as weights" in error and error.count("\n") == 1
        assert not marker.exists() and not out.exists()
    pickle.loads(plain.read_bytes())
    assert marker.exists()


@pytest.mark.case("BC059")
@pytest.mark.parametrize("to", ["huggingface", "onnx", "torch"])
def test_export_runs_no_code_of_a_checkpoint(to, tmp_path, alphabet, capsys):
    saved(SmallGPT(), tmp_path / "ckpt.pt")
    run, out, marker = tmp_path / "run", tmp_path / "out", tmp_path / "marker"
    main(["import", "nanogpt", str(tmp_path / "ckpt.pt"), "--out", str(run), "--alphabet", alphabet])
    [weights] = run.glob("checkpoints/*/model.safetensors")
    weights.write_bytes(pickle.dumps({"model": Payload(marker)}))
    (tmp_path / "a.pt").write_bytes(weights.read_bytes())
    capsys.readouterr()
    for source in (run, weights.parent, tmp_path / "a.pt"):
        assert main(["export", str(source), "--to", to, "--out", str(out)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not marker.exists() and not out.exists()


def test_damaged_and_missing_files_are_one_line(tmp_path, alphabet, capsys):
    saved(SmallGPT(), tmp_path / "ckpt.pt")
    data = (tmp_path / "ckpt.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("half.pt", "empty.pt", "missing.pt", "."):
        command = ["import", "labml", str(tmp_path / name), "--out", str(tmp_path / "run"), "--heads", "2"]
        assert main([*command, "--alphabet", alphabet]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for options in ([], ["--text", "x.txt", "--alphabet", alphabet]):
        assert main(["import", "labml", "a.pt", "--out", "b", *options]) == 2
        assert "give --text or --alphabet" in capsys.readouterr().err


@pytest.fixture(scope="module")
def labml(tmp_path_factory):
    if not PEERS.exists():
        pytest.skip("no .venv-peers with labml-nn to compare with")
    folder = tmp_path_factory.mktemp("labml")
    subprocess.run(
        [PEERS, Path(__file__).with_name("labml_models.py"), folder, str(VOCAB)], check=True, timeout=240
    )
    return folder


@pytest.mark.parametrize("name", ["basic", "learned", "gated", "aft"])
def test_a_labml_checkpoint_has_its_logits(name, labml, tmp_path, alphabet, capsys):
    command = ["import", "labml", str(labml / f"{name}.pth"), "--alphabet", alphabet]
    if name != "aft":
        assert (
            main(
                [
                    *command,
                    "--out",
                    str(tmp_path / "no"),
                    "--activation",
                    "swiglu" if name == "gated" else "relu",
                ]
            )
            == 2
        )
        assert "--heads" in capsys.readouterr().err
        command += ["--heads", "2"]
    if name == "gated":
        assert main([*command, "--out", str(tmp_path / "no")]) == 2
        assert "swiglu" in capsys.readouterr().err
        command += ["--activation", "swiglu"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    expected = torch.load(labml / f"{name}-logits.pt", weights_only=True)
    run = load_run(tmp_path / "run")
    torch.testing.assert_close(
        run.model(expected["ids"].T).transpose(0, 1), expected["logits"], rtol=0, atol=1e-5
    )
    assert main(["sample", str(tmp_path / "run"), "--prompt", "a ", "--tokens", "5"]) == 0

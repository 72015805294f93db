"""The pictures are of the weights the model really used: with them its own outputs come out."""

from __future__ import annotations

import pytest
import torch

from postil.cli import main
from postil.registry import REGISTRY, ModelSettings, build_language_model
from postil.showing import as_page, draw, pictures
from postil.showing.weights import CHANNELS, _noting

T = 9
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])
OPTIONS = {
    "aft-local": {"local_window_size": 4},
    "aft-conv": {"kernel_size": 4},
    "aft-conv-2d": {"width": 3, "kernel_size": 3},
}


def model_of(mixer: str, d_model: int = 8, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    settings = ModelSettings(
        d_model=d_model, n_layers=2, heads=2, d_ff=16, seq_len=12, dropout=0.0, options=OPTIONS.get(mixer, {})
    )
    model = build_language_model(mixer, settings, 11).to(dtype).eval()
    # Biases start at zero, where a picture of them could be of anything.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def of_kind(found, kind, layer):
    return [each for each in found if each.kind == kind and each.layer == layer]


# Of the second kind are the sizes that compiled kernels compute, which let nobody look inside.
@pytest.mark.parametrize("kind", [(8, torch.float64), (32, torch.float32)], ids=str)
@pytest.mark.parametrize("mixer", REGISTRY)
def test_weights_are_causal_means(mixer, kind):
    found = pictures(model_of(mixer, *kind), IDS)
    assert {each.layer for each in found if each.over_text} == {1, 2}
    for each in found:
        if not each.over_text:
            assert len(each.columns) == each.values.shape[
                1
            ] == 3 and each.values.sum().item() == pytest.approx(1)
            continue
        assert each.values.shape == (T, T) and not each.values.triu(1).any()
        if each.kind != "position biases":
            rows = each.values.sum(dim=1)
            first = 0.0 if each.kind == "memory attention" else 1.0
            expected = torch.cat([torch.tensor([first]), torch.ones(T - 1)]).to(rows)
            torch.testing.assert_close(rows, expected)


def inputs_of(model):
    mixers = [layer.self_attn for layer in model.backbone.layers]
    with _noting(mixers) as notes, torch.no_grad():
        model(IDS[None])
    return [(mixer, given["query"]) for mixer, given in notes]


def test_attention_weights_give_the_output():
    model = model_of("multi-head-attention")
    found = pictures(model, IDS)
    for layer, (mixer, x) in enumerate(inputs_of(model), start=1):
        weights = torch.stack([each.values for each in of_kind(found, "attention", layer)])
        mixed = torch.einsum("hts,sbhe->tbhe", weights, mixer.value(x)).flatten(-2)
        from postil.masks import Mask

        expected = mixer(query=x, key=x, value=x, mask=Mask(causal=True))
        torch.testing.assert_close(mixer.output(mixed), expected)


@pytest.mark.parametrize("mixer", ["aft-full", "aft-simple", "aft-local", "aft-conv"])
def test_aft_weights_give_the_output(mixer):
    from postil.masks import Mask

    model = model_of(mixer)
    found = pictures(model, IDS)
    for layer, (module, x) in enumerate(inputs_of(model), start=1):
        operands = module.operands(query=x, key=x, value=x, mask=Mask(causal=True))
        expected, gate, value = (
            module.mix(*operands)[:, 0],
            torch.sigmoid(operands[0])[:, 0],
            operands[2][:, 0],
        )
        shown = of_kind(found, "AFT weights", layer)
        if mixer == "aft-conv":
            channels = [(each, slice(4 * h, 4 * h + 4)) for h, each in enumerate(shown)]
        else:
            assert shown[0].part == "mean of all channels" and len(shown) == CHANNELS + 1
            channels = [
                (each, slice(c, c + 1)) for each in shown[1:] for c in [int(each.part.split()[1]) - 1]
            ]
        for each, c in channels:
            torch.testing.assert_close(gate[:, c] * (each.values @ value[:, c]), expected[:, c])


def test_biases_end_at_the_window():
    for mixer in ("aft-local", "aft-conv"):
        near = torch.ones(T, T).tril().triu(-3).bool()
        for each in of_kind(pictures(model_of(mixer), IDS), "position biases", 1):
            assert not each.values[~near].any() and each.values[near].all()
    assert not of_kind(pictures(model_of("aft-simple"), IDS), "position biases", 1)


@pytest.mark.parametrize("mixer", ["feedback", "feedback-original"])
def test_feedback_weights_give_what_each_step_reads(mixer):
    model = model_of(mixer)
    found = pictures(model, IDS)
    attention = model.backbone.layers[1].attn
    outputs = []
    hook = attention.register_forward_hook(
        lambda module, _, given, output: outputs.append((given, output)), with_kwargs=True
    )
    with torch.no_grad():
        _, state = model.step(IDS[:1])
        for token in IDS[1:]:
            _, state = model.step(token[None], state)
    hook.remove()
    shown = of_kind(found, "memory attention", 2)
    assert len(outputs) == T - 1
    for t, (given, output) in enumerate(outputs, start=1):
        weights = torch.stack([each.values[t, :t] for each in shown], dim=1).to(output)
        mixed = torch.einsum("sh,sbhe->bhe", weights, given["value"]).flatten(-2)
        torch.testing.assert_close(attention.output(mixed), output)


def test_the_model_is_left_as_it_was():
    model = model_of("aft-local").train()
    pictures(model, IDS)
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_shown():
    with pytest.raises(ValueError, match="fewer than two tokens"):
        pictures(model_of("aft-simple"), IDS[:1])
    model = model_of("aft-simple")
    model.backbone = torch.nn.Identity()
    with pytest.raises(ValueError, match="Identity has no mixer"):
        pictures(model, IDS)


# ## Files
def test_figures_are_the_same_each_time(tmp_path):
    found, tokens = pictures(model_of("aft-local"), IDS), list("the fox s")
    names = ["aft-weights.png", "aft-weights.svg", "position-biases.png", "position-biases.svg"]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        assert sorted(path.name for path in draw(found, tokens, tmp_path / folder)) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_token_cannot_leave_its_block():
    found = pictures(model_of("aft-simple"), IDS)
    page = as_page(found, ["</script><script>alert(1)</script>", *"abcdefgh"], "a <b>")
    assert "<script>alert" not in page and "<h1>a &lt;b&gt;</h1>" in page


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("POSTIL_CACHE", str(tmp_path / "cache"))
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("the fox saw the hen and the hen saw no fox. " * 50)
    shape = [
        "--model.d_model=8",
        "--model.heads=2",
        "--model.n_layers=1",
        "--model.seq_len=16",
        "--threads=1",
    ]
    few = [
        "--updates=1",
        "--optimizer.batch_size=2",
        "--optimizer.warmup=1",
        "--prompt=the ",
        "--sample-tokens=2",
    ]
    assert main(["train", f"--text={text}", f"--out={run}", "--mixer=aft-conv", *few, *shape]) == 0
    assert main(["show", str(run), "--prompt", "the fox saw the hen"]) == 0
    said = capsys.readouterr()
    assert "the first 16 are shown" in said.err and "of 16 tokens" in said.out
    assert {path.suffix for path in (run / "pictures").iterdir()} == {".html", ".svg", ".png"}
    assert main(["show", str(run), "--prompt", "é"]) == 2

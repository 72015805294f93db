"""The language model over every registered mixer: decoding, learning, tying, limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from postil.language_model import IGNORED, LanguageModel, NextTokenLoss, next_token_loss
from postil.registry import REGISTRY, ModelSettings, build_backbone, build_language_model


def build(name: str, **changes) -> LanguageModel:
    example = replace(REGISTRY[name].example, seq_len=40, n_layers=2, **changes)
    return build_language_model(name, example, 17)


@pytest.fixture(params=sorted(REGISTRY))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def test_prefill_and_step_equal_forward(name: str) -> None:
    model = build(name).double()
    ids = torch.randint(17, (3, 20))
    whole = model(ids)
    head, state = model.prefill(ids[:, :7])
    rows = [head]
    for t in range(7, 20):
        row, state = model.step(ids[:, t], state)
        rows.append(row[:, None])
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, rtol=1e-9, atol=1e-9)


def test_it_learns_64_tokens_by_heart(name: str) -> None:
    example = replace(REGISTRY[name].example, seq_len=64, n_layers=2, d_model=32, d_ff=64)
    model = build_language_model(name, example, 17)
    text = torch.randint(17, (1, 65))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = torch.tensor(0.0)
    for _ in range(300):
        optimizer.zero_grad()
        loss = NextTokenLoss(model)(text[:, :-1], text[:, 1:])[0] / 64
        if loss < 0.05:
            return
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is still {loss:.3f}")


def test_the_loss_leaves_ignored_targets_out_and_is_a_sum() -> None:
    logits = torch.randn(2, 5, 7)
    targets = torch.randint(7, (2, 5))
    masked = targets.clone()
    masked[0, 2:] = IGNORED
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(next_token_loss(logits, targets), expected.sum())
    kept = expected[masked != IGNORED].sum()
    torch.testing.assert_close(next_token_loss(logits, masked), kept)
    half = next_token_loss(logits.bfloat16(), targets)
    assert half.dtype == torch.float32


def test_correct_predictions_are_counted() -> None:
    model = build("multi-head-attention")
    ids = torch.randint(17, (2, 9))
    likeliest = model(ids).argmax(-1)
    _, correct = NextTokenLoss(model)(ids, likeliest)
    assert int(correct) == 18
    likeliest[0, :4] = IGNORED
    assert int(NextTokenLoss(model)(ids, likeliest)[1]) == 14


@pytest.mark.case("BC030")
def test_a_text_that_is_too_long_names_both_lengths() -> None:
    model = build("multi-head-attention")
    for call in (model, model.prefill):
        with pytest.raises(ValueError, match=r"41 tokens.*at most 40"):
            call(torch.zeros(1, 41, dtype=torch.long))
    _, state = model.prefill(torch.zeros(1, 40, dtype=torch.long))
    with pytest.raises(ValueError, match="41 tokens"):
        model.step(torch.zeros(1, dtype=torch.long), state)
    assert build("multi-head-attention", positions="none").max_len is None


def test_tied_weights_are_one_tensor() -> None:
    model = build("multi-head-attention", tie_weights=True)
    assert model.generator.projection.weight is model.embedding.linear.weight
    untied = build("multi-head-attention")
    tied_count = sum(p.numel() for p in model.parameters())
    assert tied_count == sum(p.numel() for p in untied.parameters()) - 17 * model.embedding.d_model


@pytest.mark.parametrize(
    ("mixer", "changes", "message"),
    [
        ("rnn", {}, "mixer='rnn' is not known"),
        ("multi-head-attention", {"positions": "cosine"}, "positions='cosine' is not known"),
        ("multi-head-attention", {"options": {"depth": 3}}, r"options=\{'depth': 3\} do not fit"),
        ("multi-head-attention", {"activation": "tanh"}, "tanh"),
        ("multi-head-attention", {"n_layers": 0}, "n_layers=0"),
    ],
)
def test_what_cannot_be_built_is_named(mixer: str, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_language_model(mixer, replace(ModelSettings(), **changes), 17)


def test_options_reach_the_mixer() -> None:
    backbone = build_backbone("multi-head-attention", ModelSettings(options={"window": 8}))
    assert backbone.layers[0].self_attn.window == 8  # type: ignore[attr-defined]

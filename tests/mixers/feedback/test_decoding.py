"""One position as a function of tensors equals the same position of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import D, F, H, L, assert_steps, build, sequence
from torch import Tensor, nn

from postil.masks import Mask
from postil.mixers.feedback import FeedbackTransformer, FeedbackTransformerKV, decoding, kernel
from postil.transformer.feed_forward import FeedForward

BOTH = pytest.mark.parametrize("shared", [True, False])
Model = FeedbackTransformer | FeedbackTransformerKV


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each step that the plain form computes; the kernel computes none."""
    calls, step = [], decoding.step
    monkeypatch.setattr(kernel, "steps", lambda *operands: False)
    monkeypatch.setattr(decoding, "step", lambda *operands: calls.append(1) or step(*operands))
    return calls


@torch.no_grad()
@BOTH
@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"norm_memory": True}, {"combine": "top"}, {"positions": 7}, {"dropout": 0.5}],
    ids=str,
)
def test_plain_steps_equal_the_whole_sequence(
    shared: bool, batch: int, options: dict[str, object], steps: list[int]
) -> None:
    model, x = build(shared, **options).eval(), sequence(30, batch)
    expected = model(x)
    _, state = model.prefill(x[:2])
    assert_steps(model, x, expected, state, 2, 1e-10)
    assert len(steps) == 28


# Padding in front, longer than the prompt in one row: there the first steps read nothing at all.
@torch.no_grad()
@BOTH
def test_plain_steps_after_padding(shared: bool, steps: list[int]) -> None:
    model, x = build(shared), sequence(20, 3)
    keys = torch.arange(20)[:, None] >= torch.tensor([0, 3, 6])
    expected = model(x, Mask(keys=keys))
    _, state = model.prefill(x[:6], mask=Mask(keys=keys[:6]))
    assert_steps(model, x, expected, state, 6, 1e-10)
    assert len(steps) == 14


@torch.no_grad()
def test_a_batch_of_none(steps: list[int]) -> None:
    model = build()
    _, state = model.prefill(sequence(3, 0))
    y, state = model.step(sequence(1, 0)[0], state)
    assert y.shape == (0, D) and state.memory[0].shape[0] == 4 and len(steps) == 1


# A whole sequence keeps autocast out, so a step has to as well.
@torch.no_grad()
def test_autocast_changes_nothing(steps: list[int]) -> None:
    model, x = build(dtype=torch.float32), sequence(4, 2, torch.float32)
    _, state = model.prefill(x[:3])
    expected = model.step(x[3], state)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.step(x[3], state)[0], expected)
    assert len(steps) == 2


# ## Parts that are not what they were
#
# Everything that follows changes what a part of the model computes, and both the whole sequence and a step
# must compute with it. They did not look: an adapter around a linear map was left out, silently.
class Adapter(nn.Module):
    """Adds to what a linear map gives, and lets the map's weight be seen, as adapters do."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.more = nn.Linear(base.in_features, base.out_features, dtype=base.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.more(x)


def exchange(parent: nn.Module, name: str, make: Callable[[nn.Module], nn.Module]) -> None:
    setattr(parent, name, make(getattr(parent, name)))


def key_of(model: Model) -> nn.Module:
    return model.key if isinstance(model, FeedbackTransformerKV) else model.layers[0].attn.key


def doubled(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, given, output: 2 * output)


CHANGES: dict[str, Callable[[Model], object]] = {
    "an adapter of the query": lambda m: exchange(m.layers[0].attn.query, "linear", Adapter),
    "an adapter of the output": lambda m: exchange(m.layers[1].attn, "output", Adapter),
    "an adapter of the key": lambda m: exchange(key_of(m), "linear", Adapter),
    "an adapter in the feed-forward network": lambda m: exchange(m.layers[1].feed_forward, "layer1", Adapter),
    "a hook on a linear map": lambda m: doubled(m.layers[0].attn.output),
    "a hook on attention": lambda m: doubled(m.layers[0].attn),
    "a hook on a layer": lambda m: doubled(m.layers[1]),
    "a hook on what makes keys": lambda m: doubled(key_of(m)),
    "another forward": lambda m: setattr(m.layers[0].norm_ff, "forward", lambda x: 3 * x),
    "another epsilon": lambda m: setattr(m.layers[0].norm_ff, "eps", 0.5),
    "another epsilon at the end": lambda m: setattr(m.norm, "eps", 0.5),
    "another norm": lambda m: exchange(m.layers[0], "norm_self_attn", lambda _: nn.RMSNorm(D).double()),
    "another norm at the end": lambda m: exchange(m, "norm", lambda _: nn.Identity()),
    "a wider network": lambda m: exchange(
        m.layers[1], "feed_forward", lambda _: FeedForward(D, 2 * F, 0.0).double()
    ),
    "a query with a bias": lambda m: exchange(
        m.layers[0].attn.query, "linear", lambda _: nn.Linear(D, D).double()
    ),
}


class Tracked(FeedForward):
    """Computes the same, but is of another class, so that its model is walked through."""


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_changed_parts_are_computed_with(change: str, shared: bool) -> None:
    model = build(shared)
    walked = build(shared, feed_forward=Tracked(D, F, 0.0))
    walked.load_state_dict(model.state_dict())
    x = sequence(6, 2)
    with torch.no_grad():
        before = model(x)
        _, state = model.prefill(x[:4])
        _, state = model.step(x[4], state)
    for each in (model, walked):
        torch.manual_seed(1)
        CHANGES[change](each)
    y = model(x)
    torch.testing.assert_close(y, walked(x), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(y, before)
    with torch.no_grad():
        _, state = model.prefill(x[:4])
        assert_steps(model, x, y, state, 4, 1e-10)


# A hook that is taken away again leaves nothing behind: steps are fast again.
@torch.no_grad()
@BOTH
def test_a_hook_sees_every_step_while_it_is_there(shared: bool, steps: list[int]) -> None:
    model, x, seen = build(shared), sequence(6, 2), []
    _, state = model.prefill(x[:2])
    _, state = model.step(x[2], state)
    hook = model.layers[L - 1].attn.register_forward_pre_hook(lambda *given: seen.append(1))
    expected, _ = model.step(x[3], state)
    hook.remove()
    y, _ = model.step(x[3], state)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    assert (len(seen), len(steps)) == (1, 2)


# Tables of positions may differ between layers; what one layer cannot tell apart another may.
@torch.no_grad()
def test_tables_of_different_lengths() -> None:
    model, x = build(positions=12), sequence(20, 2)
    attn = model.layers[1].attn
    attn.key_pos_embeddings = nn.Parameter(torch.randn(5, H, D // H, dtype=torch.float64))
    attn.key_pos_bias = nn.Parameter(torch.randn(5, H, dtype=torch.float64))
    expected = model(x)
    _, state = model.prefill(x[:4])
    assert_steps(model, x, expected, state, 4, 1e-10)

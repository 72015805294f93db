"""The compiled form equals the plain one, which equals the equation."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conftest import CAUSAL
from postil.masks import Mask
from postil.mixers.aft import AFTLocal, aft_conv, aft_local, aft_simple, kernel
from postil.mixers.aft.gated_mean import Reach

BUILT = kernel.KERNEL.available()
needs_kernel = pytest.mark.skipif(not BUILT, reason=f"no kernel here: {kernel.KERNEL.library()}")

# T, S, B, D, window, the first query's position; widths that fill no whole vector, windows of every kind.
SIZES = {
    "one row": (1, 1, 1, 3, 4, 0),
    "less than a chunk": (37, 37, 3, 5, 4, 0),
    "one chunk, window 1": (64, 64, 2, 16, 1, 0),
    "window as wide as the rows of a block": (130, 130, 1, 33, 8, 0),
    "chunks": (300, 300, 4, 64, 32, 0),
    "window wider than a chunk": (210, 210, 1, 17, 100, 0),
    "window wider than the text": (50, 50, 1, 20, 70, 0),
    "after other keys": (70, 95, 2, 24, 9, 25),
    "after many": (20, 220, 2, 24, 40, 200),
    "keys that nobody reads": (70, 150, 2, 24, 9, 0),
    "fewer keys than positions": (150, 70, 2, 24, 9, 0),
}
KEYS = {
    "plain": lambda k: k,
    "rising": lambda k: k + torch.linspace(-90, 90, len(k))[:, None, None] * torch.rand(k.shape[1:]),
    "falling": lambda k: k - torch.linspace(-90, 90, len(k))[:, None, None] * torch.rand(k.shape[1:]),
    "spikes": lambda k: k + 60.0 * (torch.rand(k.shape) > 0.97),
}
MASKS = {
    "causal": lambda s, b: CAUSAL,
    "padded": lambda s, b: Mask(causal=True, keys=torch.rand(s, b) > 0.3),
    "padded in front": lambda s, b: Mask(causal=True, keys=torch.arange(s)[:, None] >= 40 * torch.arange(b)),
    "window": lambda s, b: Mask(causal=True, window=23),
}


def results(operands: list[Tensor], mask: Mask) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in operands]
    y = aft_local(*leaves, mask)
    return [y, *torch.autograd.grad(y.sin().sum(), leaves)]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch):
    def compute(operands: list[Tensor], mask: Mask) -> list[Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "fits", lambda *problem: False)
            return results(operands, mask)

    return compute


# In float64 the plain form is the truth; single precision may miss it by what it loses itself.
@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_equal_the_plain_form(
    size: str, keys: str, mask: str, threads: int, plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    t, s, b, d, window, offset = SIZES[size]
    q, k, v = torch.randn(t, b, d), KEYS[keys](torch.randn(s, b, d)), torch.randn(s, b, d)
    operands = [q, k, v, torch.randn(t + offset, 2 * window - 1)]
    rules = replace(MASKS[mask](s, b), offset=offset)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(kernel, "FEW", 0)
    calls = []
    run = kernel.KERNEL.call
    monkeypatch.setattr(kernel.KERNEL, "call", lambda *call: (calls.append(call[0]), run(*call)))
    single = results(operands, rules)
    assert calls == ["aft_forward", "aft_backward"]
    truth = plain([x.double() for x in operands], rules)
    beside = plain(operands, rules)
    for ours, wide, other in zip(single, truth, beside, strict=True):
        assert ours.isfinite().all()
        # Of one key alone the gradient is zero, and has no relative error: hence the tenth.
        error, plain_error = ((x.double() - wide).norm() / (wide.norm() + 0.1) for x in (ours, other))
        assert error <= max(2e-6, 2 * plain_error)


# What follows a row may raise the reference within its chunk, and then its own chunk is computed in pieces.
@needs_kernel
@pytest.mark.parametrize("rise", [1.0, 19.0, 25.0, 300.0])
@pytest.mark.parametrize("changed", [1, 7, 8, 63, 64, 100, 149])
def test_the_past_keeps_its_bits(changed: int, rise: float) -> None:
    q, k, v, band = (
        torch.randn(150, 2, 20),
        torch.randn(150, 2, 20),
        torch.randn(150, 2, 20),
        torch.randn(150, 17),
    )
    before = aft_local(q, k, v, band, CAUSAL)
    moved = k.clone()
    moved[changed:] += rise * torch.rand(150 - changed, 2, 20)
    after = aft_local(q, moved, v, band, CAUSAL)
    assert torch.equal(after[:changed], before[:changed])
    assert not torch.equal(after[changed:], before[changed:])


# A column lies now in the middle of a vector, now alone at its end.
@needs_kernel
def test_a_column_does_not_depend_on_its_neighbours() -> None:
    q, k, v, band = (
        torch.randn(90, 1, 37),
        torch.randn(90, 1, 37),
        torch.randn(90, 1, 37),
        torch.randn(90, 17),
    )
    together = aft_local(q, k, v, band, CAUSAL)
    for column in (0, 15, 16, 36):
        some = slice(column, column + 1)
        alone = aft_local(q[..., some], k[..., some], v[..., some], band, CAUSAL)
        assert torch.equal(alone, together[..., some])


def test_what_does_not_fit_is_left_to_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.KERNEL, "call", lambda *call: pytest.fail("the kernel was not made for this"))
    q, k, v, band = *(torch.randn(20, 2, 8) for _ in range(3)), torch.randn(20, 9)
    aft_local(q, k, v, band, Mask())
    aft_local(*(x.double() for x in (q, k, v, band)), CAUSAL)
    aft_local(*(x.bfloat16() for x in (q, k, v, band)), CAUSAL)
    aft_conv(q, k[..., :2], v, torch.randn(2, 5), 4, CAUSAL)


@needs_kernel
def test_simple_and_local_are_computed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(kernel.KERNEL, "call", lambda *call: calls.append(call[0]))
    q, k, v = (torch.randn(20, 2, 8) for _ in range(3))
    for run in (
        lambda: aft_simple(q, k, v, CAUSAL),
        lambda: aft_local(q, k, v, torch.randn(20, 9), CAUSAL),
        lambda: AFTLocal(8, 20, 3).prefill(q),
    ):
        calls.clear()
        run()
        assert calls == ["aft_forward"]


# The kernel overlooks biases that a list holds outside of its band, so it must be told that there are none.
def test_only_a_band_fits() -> None:
    q, k, bias = torch.randn(20, 2, 1, 1), torch.randn(20, 2, 1), torch.randn(1, 2, 16, 32)
    assert kernel.fits(q, k, q, bias, Reach(16, 0, 0, True, True, skewed=True)) == BUILT
    assert not kernel.fits(q, k, q, bias, Reach(16, 0, 0, True, True))
    assert not kernel.fits(q, k, q.bfloat16(), bias, Reach(16, 0, 0, True, True, skewed=True))

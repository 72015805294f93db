"""The range of numbers: no look into the future, no overflow, no drift."""

import math

import pytest
import torch
from torch import Tensor

from conftest import CAUSAL, MEMBERS, Member, perturbed
from postil.masks import Mask
from postil.mixers.aft import kernel


# Two forms of the same numbers: the compiled one where it fits, and the plain one that serves elsewhere.
@pytest.fixture(autouse=True, params=["compiled where it fits", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(kernel, "fits", lambda *problem: False)


def relative_rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt())


def detached(operands: list) -> list:
    return [x.detach() if isinstance(x, Tensor) else x for x in operands]


def as_dtype(operands: list, dtype: torch.dtype) -> list:
    return [x.to(dtype) if isinstance(x, Tensor) else x for x in operands]


@pytest.mark.case("BC012")
@pytest.mark.parametrize("keys", ["std 50", "all +100", "all -300", "ramp up", "ramp down", "one spike"])
@pytest.mark.parametrize("mask", [Mask(), CAUSAL])
def test_extreme_keys_equal_the_float64_reference(member: Member, keys: str, mask: Mask) -> None:
    operands = detached(member.operands(64, 64, 2, dtype=torch.float64))
    k = operands[1]
    ramp = torch.linspace(-200, 200, 64, dtype=k.dtype)[:, None, None].expand_as(k)
    operands[1] = {
        "std 50": 50 * k,
        "all +100": k + 100,
        "all -300": k - 300,
        "ramp up": k + ramp,
        "ramp down": k - ramp,
        "one spike": k + 300.0 * (torch.arange(64) == 40)[:, None, None],
    }[keys]
    # Both sides must read the same numbers, so the truth is that of the rounded ones.
    operands = as_dtype(as_dtype(operands, torch.float32), torch.float64)
    truth = member.reference(*operands, mask)
    single = as_dtype(operands, torch.float32)
    fast = member.fast(*single, mask)
    assert fast.isfinite().all()
    assert relative_rms(fast, truth) <= max(5e-6, 2 * relative_rms(member.reference(*single, mask), truth))


@pytest.mark.case("BC012")
@pytest.mark.parametrize("size", [50.0, 200.0])
@pytest.mark.parametrize("mask", [Mask(), CAUSAL])
def test_gradients_of_extreme_keys_and_biases(member: Member, size: float, mask: Mask) -> None:
    operands = detached(member.operands(40, 40, 2, dtype=torch.float64))
    operands[1] = size * operands[1]
    if len(operands) > 3:
        operands[3] = size * operands[3]
    results = []
    for form, dtype in (
        (member.fast, torch.float64),
        (member.reference, torch.float64),
        (member.fast, torch.float32),
    ):
        leaves = [x.to(dtype).requires_grad_() if isinstance(x, Tensor) else x for x in operands]
        y = form(*leaves, mask)
        wanted = [x for x in leaves if isinstance(x, Tensor)]
        results.append((y, *torch.autograd.grad(y.sin().sum(), wanted)))
    for fast, reference, single in zip(*results, strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-9, atol=1e-10)
        assert single.isfinite().all()


# The rows before a key that changes do not move by a bit: their reference is the maximum over their own past,
# even where the change makes them overflow or vanish beside it.
@pytest.mark.case("BC017", "BC018")
@pytest.mark.parametrize("rise", [1.0, 18.0, 22.0, 60.0, 100.0, 300.0, 3e4])
@pytest.mark.parametrize("length", [5, 130, 700])
def test_the_past_keeps_its_bits(member: Member, rise: float, length: int) -> None:
    operands = detached(member.operands(length, length, 1, dtype=torch.float32))
    before = member.fast(*operands, CAUSAL)
    for changed in (length - 1, length // 2):
        moved = list(operands)
        moved[1] = operands[1].clone()
        moved[1][changed] += rise
        after = member.fast(*moved, CAUSAL)
        assert torch.equal(after[:changed], before[:changed])
        assert after.isfinite().all()
        assert not torch.equal(after[changed:], before[changed:])


# The case in which a maximum over the whole sequence gives NaN; in float16 already from 18 on.
@pytest.mark.parametrize("name", ["full", "simple", "local", "conv"])
@pytest.mark.parametrize(
    ("dtype", "last", "tolerance"),
    [(torch.float32, 104.0, 1e-6), (torch.float16, 18.0, 2e-3), (torch.bfloat16, 104.0, 2e-2)],
)
def test_a_large_last_key_leaves_the_rows_before_finite(
    name: str, dtype: torch.dtype, last: float, tolerance: float
) -> None:
    member = MEMBERS[name]
    operands = detached(member.operands(4, 4, 1, dtype=torch.float64))
    operands[1] = last * (torch.arange(4) == 3).double()[:, None, None].expand_as(operands[1])
    operands[2] = torch.ones_like(operands[2])
    truth = member.reference(*operands, CAUSAL)
    y = member.fast(*as_dtype(operands, dtype), CAUSAL)
    torch.testing.assert_close(y.double(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.case("BC014")
def test_sums_do_not_stick_in_bfloat16() -> None:
    from postil.mixers.aft import AFTSimple

    module = AFTSimple(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.value.weight.fill_(1.0)
        module.output.weight.fill_(2.0)
    x = torch.zeros(4096, 1, 1)
    x[2048:] = 1.0
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y = module(query=x, key=x, value=x, mask=CAUSAL)
        _, state = module.prefill(x[:4000])
        for x_t in x[4000:]:
            stepped, state = module.step(x_t, state)
    # The gate of a query of zero is one half, and the output layer doubles it away.
    assert abs(float(y[-1]) - 0.5) <= 0.01
    assert abs(float(stepped) - 0.5) <= 0.01


@pytest.mark.parametrize("name", ["local", "simple", "conv"])
def test_a_long_sequence_loses_no_digits(name: str) -> None:
    member, length = MEMBERS[name], 8192
    operands = detached(member.operands(length, length, 1, dtype=torch.float64))
    operands = as_dtype(as_dtype(operands, torch.float32), torch.float64)
    # In float64 the fast form equals the reference to 1e-10 (test_forms); here it is the truth at a length
    # that the reference could not hold.
    truth = member.fast(*operands, CAUSAL)
    assert relative_rms(member.fast(*as_dtype(operands, torch.float32), CAUSAL), truth) <= 2e-6


@pytest.mark.case("BC018")
def test_autocast_and_steps_do_not_leak(member: Member) -> None:
    module = perturbed(member.module(6, 20))
    x = torch.randn(20, 2, 6)
    changed = x.clone()
    changed[-1] += 100.0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before, after = (module(query=z, key=z, value=z, mask=CAUSAL) for z in (x, changed))
    assert torch.equal(before[:-1], after[:-1])


@pytest.mark.case("BC005")
def test_a_mask_read_the_other_way_round_leaks(member: Member) -> None:
    operands = detached(member.operands(6, 6, 2, dtype=torch.float32))
    allowed = torch.ones(6, 6).tril().bool()[:, :, None]
    moved = [x.clone() if isinstance(x, Tensor) else x for x in operands]
    moved[1][5] += 3.0
    for mask, leaks in ((Mask(dense=allowed), False), (Mask(dense=~allowed), True)):
        before, after = member.fast(*operands, mask), member.fast(*moved, mask)
        assert torch.equal(before[:5], after[:5]) != leaks


# A row whose biases all lie far below the far keys' 0, or far above, leaves the range and is redone.
def test_what_leaves_the_range_is_redone_exactly() -> None:
    member = MEMBERS["local"]
    operands = detached(member.operands(30, 30, 2, dtype=torch.float64))
    for level in (-300.0, -70.0, 70.0, 300.0, 1e4):
        band = operands[3] + level
        # The nearest keys are so small that only the far ones count, and the other way round.
        k = operands[1].clone()
        k[10:20] -= level
        for mask in (Mask(), CAUSAL):
            truth = member.reference(operands[0], k, operands[2], band, mask)
            fast = member.fast(operands[0], k, operands[2], band, mask)
            torch.testing.assert_close(fast, truth, rtol=1e-9, atol=1e-12)
            single = member.fast(*(x.float() for x in (operands[0], k, operands[2], band)), mask)
            assert single.isfinite().all()


def test_float32_error_under_large_biases_and_ramps() -> None:
    member, length = MEMBERS["local"], 3000
    q, k, v, _ = detached(member.operands(length, length, 1, dtype=torch.float32))
    band = 100 * torch.rand(length, 9) - 50
    ramp = torch.linspace(-200, 200, length)[:, None, None]
    for keys in (k, k + ramp, k - ramp):
        truth = member.fast(*(x.double() for x in (q, keys, v, band)), CAUSAL)
        y = member.fast(q, keys, v, band, CAUSAL)
        assert relative_rms(y, truth) <= 5e-6
        assert not math.isnan(float(y.sum()))

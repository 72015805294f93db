"""The fast form equals the literal recurrence, with everything that can be asked of either."""

import copy

import pytest
import torch
from models import D, build, gradients, sequence

from postil.masks import Mask
from postil.mixers.feedback import feedback_transformer, feedback_transformer_reference
from postil.mixers.feedback.recurrence import fold, unfold

OPTIONS = {
    "nothing": {},
    "window 3": {"window": 3},
    "window 20": {"window": 20},
    "normalised memory": {"norm_memory": True},
    "top layer": {"combine": "top"},
    "mean": {"combine": "mean"},
    "dropout": {"dropout": 0.3},
    "dropout, window": {"dropout": 0.2, "window": 5},
    "few positions": {"positions": 4},
}
MASKS = {
    "none": lambda t, b: None,
    "padding": lambda t, b: Mask(keys=torch.rand(t, b) > 0.3),
    "padding in front": lambda t, b: Mask(keys=torch.arange(t)[:, None] >= torch.tensor([0, 3, t - 1])),
    "dense": lambda t, b: Mask(window=4, dense=torch.rand(t, t, b) > 0.3),
    "window of one": lambda t, b: Mask(window=1),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_fast_equals_literal(shared: bool, mask: str, options: str) -> None:
    # 37 positions are two whole chunks of the backward pass and a part of a third.
    model, x = build(shared, **OPTIONS[options]), sequence(37).requires_grad_()
    operands = model.operands(x, MASKS[mask](37, 3))
    inputs = [x, *model.parameters()]
    results = []
    for form in (feedback_transformer, feedback_transformer_reference):
        y, (keys, values) = form(*operands)
        # The memory is a result as well, and what comes after may send gradients into it.
        everything = torch.cat([y.flatten(), keys.flatten(), values.flatten()])
        results.append([y, keys, values, *gradients(everything, inputs)])
    for fast, literal in zip(*results, strict=True):
        torch.testing.assert_close(fast, literal, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding in front", "dense"])
@pytest.mark.parametrize("options", ["nothing", "window 3", "dropout, window"])
def test_recomputed_probabilities_are_the_kept_ones(shared: bool, mask: str, options: str) -> None:
    model, x = build(shared, **OPTIONS[options]), sequence(37).requires_grad_()
    operands = model.operands(x, MASKS[mask](37, 3))
    results = []
    for recompute in (False, True):
        y, (keys, values) = feedback_transformer(*operands, recompute=recompute)
        everything = torch.cat([y.flatten(), keys.flatten(), values.flatten()])
        results.append([y, *gradients(everything, [x, *model.parameters()])])
    for kept, again in zip(*results, strict=True):
        assert again is None if kept is None else torch.equal(kept, again)


def test_a_model_that_recomputes_keeps_no_probabilities() -> None:
    kept = []
    for recompute in (False, True):
        y = build(recompute=recompute)(sequence(40).requires_grad_())
        function = y.grad_fn.next_functions[0][0]
        kept.append(sum(t.numel() for t in function.saved_tensors if t is not None))
    # A number for each pair of positions, layer, row and head.
    assert kept[0] - kept[1] == 40 * 40 * 2 * 3 * 2


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("options", ["nothing", "window 3", "normalised memory", "dropout"])
def test_carried_memory_equals_one_long_segment(shared: bool, options: str) -> None:
    model, x = build(shared, **OPTIONS[options]).eval(), sequence(40).requires_grad_()
    inputs = [x, *model.parameters()]
    keys = torch.rand(40, 3) > 0.2
    whole = model(x, Mask(keys=keys))
    state, parts = None, []
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        y, state = model.prefill(x[start:stop], state, mask=Mask(keys=keys[start:stop]))
        parts.append(y)
    pieces = torch.cat(parts)
    torch.testing.assert_close(pieces, whole, rtol=1e-10, atol=1e-10)
    for a, b in zip(gradients(pieces, inputs), gradients(whole, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_detached_memory_is_read_but_gets_no_gradient() -> None:
    model, x = build(), sequence(10).requires_grad_()
    _, state = model.prefill(x[:6])
    y, _ = model.prefill(x[6:], state.detached())
    torch.testing.assert_close(y, model(x)[6:], rtol=1e-10, atol=1e-10)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert (gradient[:6] == 0).all()
    assert (gradient[6:] != 0).any()


@pytest.mark.parametrize("shared", [True, False])
def test_padding_in_front_changes_nothing(shared: bool) -> None:
    model, x = build(shared), sequence(9, 1)
    padded = torch.cat([torch.full((4, 1, D), float("nan"), dtype=x.dtype), x])
    keys = torch.arange(13)[:, None] >= 4
    torch.testing.assert_close(model(padded, Mask(keys=keys))[4:], model(x), rtol=1e-10, atol=1e-10)
    _, state = model.prefill(padded, mask=Mask(keys=keys))
    after = sequence(1, 1)[0]
    expected = model(torch.cat([x, after[None]]))[-1]
    torch.testing.assert_close(model.step(after, state)[0], expected, rtol=1e-10, atol=1e-10)


def test_gradients_pass_gradcheck_of_both_orders() -> None:
    model = build(layers=2, window=3, positions=3)
    x = sequence(4, 1).requires_grad_()
    parameters = [p.detach().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    keys = torch.tensor([[1], [0], [1], [1]], dtype=torch.bool)

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x, Mask(keys=keys)))

    # Along random directions; the laws check the first order number by number.
    assert torch.autograd.gradcheck(run, (x, *parameters), eps=1e-6, atol=1e-5, rtol=1e-3, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *parameters), eps=1e-6, atol=1e-5, rtol=1e-3, fast_mode=True)


@pytest.mark.parametrize("norm_memory", [True, False])
def test_folding_can_be_undone(norm_memory: bool) -> None:
    model, x = build(norm_memory=norm_memory), sequence()
    weights = model.operands(x)[1]._replace(final_gain=None, final_shift=None)
    expected = feedback_transformer_reference(x, weights)[0]
    again = feedback_transformer_reference(x, unfold(fold(weights), norm_memory))[0]
    torch.testing.assert_close(again, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    exact, x = build(), sequence(30)
    low = copy.deepcopy(exact).to(dtype)
    y = low(x.to(dtype))
    assert y.dtype == dtype
    rounded = copy.deepcopy(low).double()(x.to(dtype).double())
    # One rounding of the result on top of what single precision costs over 30 steps.
    torch.testing.assert_close(y.double(), rounded, rtol=torch.finfo(dtype).eps, atol=2e-4)


def test_autocast_does_not_round_inside() -> None:
    model, x = build(dtype=torch.float32), sequence(20, dtype=torch.float32).requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradient = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(gradient, expected)

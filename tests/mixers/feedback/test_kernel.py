"""The compiled form equals the plain one, which equals the recurrence."""

import pytest
import torch
from models import H, assert_steps

from postil.masks import Mask
from postil.mixers.feedback import (
    FeedbackAttention,
    FeedbackTransformer,
    FeedbackTransformerKV,
    FeedbackTransformerLayer,
    kernel,
    plain,
)
from postil.mixers.feedback.backward import backward
from postil.mixers.feedback.recurrence import fold
from postil.transformer.feed_forward import FeedForward

BUILT = kernel.KERNEL.available()
needs_kernel = pytest.mark.skipif(not BUILT, reason=f"no kernel here: {kernel.KERNEL.library()}")
T, B = 37, 11

CASES = {
    "shared": (True, 32, 80, {}, "none", 0),
    "shared, widths of every kind": (True, 96, 48, {}, "none", 0),
    "shared, window": (True, 32, 80, {"window": 5}, "none", 0),
    "shared, padding": (True, 32, 80, {}, "padding", 0),
    "shared, padding in front, carried": (True, 32, 80, {}, "front", 19),
    "shared, window, dense": (True, 32, 80, {"window": 20}, "dense", 0),
    "shared, normalised memory, carried": (True, 32, 80, {"norm_memory": True}, "none", 3),
    "original": (False, 32, 80, {}, "none", 0),
    "original, window, padding, carried": (False, 64, 48, {"window": 17}, "padding", 18),
}
MASKS = {
    "none": lambda: None,
    "padding": lambda: Mask(keys=torch.rand(T, B) > 0.3),
    "front": lambda: Mask(keys=torch.arange(T)[:, None] >= torch.arange(B)),
    "dense": lambda: Mask(dense=torch.rand(T, T, B) > 0.3),
}


def build(
    shared: bool, width: int, hidden: int, options: dict[str, object]
) -> FeedbackTransformer | FeedbackTransformerKV:
    attn = FeedbackAttention(H, width, 0.0, is_kv_precomputed=shared, positions=24)
    layer = FeedbackTransformerLayer(
        d_model=width, attn=attn, feed_forward=FeedForward(width, hidden, 0.0), dropout_prob=0.0
    )
    if shared:
        model = FeedbackTransformerKV(layer, 3, width, H, **options)
    else:
        model = FeedbackTransformer(layer, 3, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def problem(case: str) -> plain.Problem:
    shared, width, hidden, options, mask, carried = CASES[case]
    model = build(shared, width, hidden, options)
    with torch.no_grad():
        state = model.prefill(torch.randn(carried, B, width))[1] if carried else None
        x, weights, memory, allowed, window, _ = model.operands(
            torch.randn(T, B, width), MASKS[mask](), state
        )
        if memory is None:
            memory = (torch.zeros(0, B, weights.key_value.shape[0], H, width // H),) * 2
        reach = T + memory[0].shape[0]
        return plain.Problem(
            x,
            memory[0].permute(2, 3, 1, 0, 4),
            memory[1].permute(2, 3, 1, 0, 4),
            allowed,
            [],
            fold(weights),
            reach if window is None else min(window, reach),
            weights.memory_gain is not None,
        )


def double(p: plain.Problem) -> plain.Problem:
    weights = type(p.weights)(*(w.double() for w in p.weights))
    return p._replace(x=p.x.double(), keys=p.keys.double(), values=p.values.double(), weights=weights)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_the_plain_form(case: str, threads: int) -> None:
    p = problem(case)
    assert kernel.fits(p)
    grads = [torch.randn(T, B, p.x.shape[2])]
    torch.set_num_threads(threads)
    try:
        y, keys, values, tape = kernel.forward(p)
        grads += [torch.randn_like(keys), torch.randn_like(values)]
        compiled = kernel.backward(p, tape, y, (keys, values), grads[0], (grads[1], grads[2]))
    finally:
        torch.set_num_threads(1)
    exact = double(p)
    truth_y, truth_keys, truth_values, truth_tape = plain.forward(exact)
    a, b, c = (g.double() for g in grads)
    truth = backward(exact, truth_tape, truth_y, (truth_keys, truth_values), a, (b, c))
    pairs = [(y, truth_y), (keys, truth_keys), (values, truth_values)]
    pairs += zip((*compiled[:3], *compiled[3]), (*truth[:3], *truth[3]), strict=True)
    for result, expected in pairs:
        # A ReLU that rounds to the other side moves single numbers; the root mean square is what holds.
        error = (result.double() - expected).square().sum().sqrt()
        assert error <= 2e-4 * expected.square().sum().sqrt() + 1e-6


@needs_kernel
@pytest.mark.parametrize("case", CASES)
def test_recomputed_probabilities_are_the_kept_ones(case: str) -> None:
    p = problem(case)
    results = []
    for keep in (True, False):
        q = p._replace(keep=keep)
        y, keys, values, tape = kernel.forward(q)
        assert (tape.probabilities.numel() > 0) == keep
        grads = torch.ones_like(y), torch.ones_like(keys), torch.ones_like(values)
        dx, dk, dv, dw = kernel.backward(q, tape, y, (keys, values), grads[0], grads[1:])
        results.append([y, keys, values, dx, dk, dv, *dw])
    for kept, again in zip(*results, strict=True):
        assert torch.equal(kept, again)


# Large tables come from pages that stay with the process. They must not be anybody else's meanwhile.
@needs_kernel
def test_pages_belong_to_one_table_and_come_back() -> None:
    # Larger than any other table of these tests; only what is written to takes memory.
    size = 1 << 25
    first, second = kernel._pages(size), kernel._pages(size)
    first[:2000], second[:2000] = 1.0, 2.0
    part, address = first[1000:2000], first.data_ptr()
    del first
    third = kernel._pages(size)
    assert len({address, second.data_ptr(), third.data_ptr()}) == 3
    third[:2000] = 3.0
    assert (part == 1.0).all()
    del part
    assert kernel._pages(size).data_ptr() == address
    assert (second[:2000] == 2.0).all()


@needs_kernel
def test_the_past_does_not_move() -> None:
    p = problem("shared")
    y = kernel.forward(p)[0]
    for changed in (1, 20, T - 1):
        x = p.x.clone()
        x[changed] += 1e3
        moved = kernel.forward(p._replace(x=x))[0]
        assert torch.equal(moved[:changed], y[:changed])
        assert not torch.equal(moved[changed:], y[changed:])


@needs_kernel
def test_threads_and_company_do_not_change_a_row() -> None:
    p = problem("shared")
    y = kernel.forward(p)[0]
    alone = p._replace(x=p.x[:, 4:5].contiguous(), keys=p.keys[:, :, 4:5], values=p.values[:, :, 4:5])
    torch.testing.assert_close(kernel.forward(alone)[0], y[:, 4:5], rtol=1e-5, atol=1e-5)
    torch.set_num_threads(4)
    try:
        assert torch.equal(kernel.forward(p)[0], y)
    finally:
        torch.set_num_threads(1)


@needs_kernel
@pytest.mark.parametrize("magnitude", [1, 30, 100, 1000])
def test_large_numbers_stay_finite(magnitude: float) -> None:
    p = problem("shared")
    p = p._replace(x=magnitude * p.x)
    y, keys, values, tape = kernel.forward(p)
    zeros = torch.zeros_like(keys), torch.zeros_like(values)
    dx, _, _, dw = kernel.backward(p, tape, y, (keys, values), torch.ones_like(y), zeros)
    assert all(tensor.isfinite().all() for tensor in (y, keys, values, dx, *dw))


@needs_kernel
@torch.no_grad()
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"norm_memory": True}])
def test_compiled_steps_equal_the_whole_sequence(
    shared: bool, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, step = [], kernel.step
    monkeypatch.setattr(kernel, "step", lambda *operands: calls.append(1) or step(*operands))
    model, x = build(shared, 32, 48, options), torch.randn(40, 3, 32)
    # Padding in front, longer than the prompt in one row: there the first steps read nothing at all.
    keys = torch.arange(40)[:, None] >= torch.tensor([0, 3, 6])
    expected = model(x, Mask(keys=keys))
    _, state = model.prefill(x[:6], mask=Mask(keys=keys[:6]))
    assert_steps(model, x, expected, state, 6, 1e-5)
    assert len(calls) == 34


# Where the parameters lie is remembered between steps; every change of the model must be seen all the same.
CHANGES = {
    "in place": lambda model: model.layers[0].attn.query.linear.weight.data.mul_(2.0),
    "loaded": lambda model: model.load_state_dict(build(True, 32, 48, {}).state_dict()),
    "assigned": lambda model: model.load_state_dict(build(True, 32, 48, {}).state_dict(), assign=True),
    "moved": lambda model: model.double().float(),
    "a layer": lambda model: setattr(model.layers, "1", build(True, 32, 48, {}).layers[0]),
    "an activation": lambda model: setattr(model.layers[2].feed_forward, "activation", torch.tanh),
    "a parametrization": lambda model: torch.nn.utils.parametrizations.weight_norm(
        model.layers[1].feed_forward.layer2
    ),
    "the mixture": lambda model: model.weights.data.copy_(torch.randn(4)),
    "nothing": lambda model: None,
}


@torch.no_grad()
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_kernel), False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_sees_what_became_of_the_model(
    change: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernel, "steps", lambda *operands: False)
    model, x = build(True, 32, 48, {}), torch.randn(3, 2, 32)
    _, state = model.prefill(x[:1])
    _, state = model.step(x[1], state)
    CHANGES[change](model)
    for _ in range(2):
        y, after = model.step(x[2], state)
        h, key, _ = model._position(x[2], state.memory[:2], None)
        torch.testing.assert_close(y, model.norm(h), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after.memory[0][-1], key, rtol=1e-5, atol=1e-5)


# One state for a whole batch, by a stride of zero: all new rows would be written into one place.
@torch.no_grad()
def test_a_state_in_which_rows_share_a_place_is_continued() -> None:
    model, x = build(True, 32, 48, {}), torch.randn(4, 2, 32)
    _, state = model.prefill(x[:2, :1])
    spread = state._replace(
        keys=state.keys.expand(-1, 2, -1, -1, -1), values=state.values.expand(-1, 2, -1, -1, -1)
    )
    expected = model(torch.cat([x[:2, :1].expand(-1, 2, -1), x[2:]]))
    assert_steps(model, x, expected, spread, 2, 1e-5)


@needs_kernel
def test_steps_with_gradients_or_dropout_are_left_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "step", lambda *operands: pytest.fail("the kernel gives no gradients"))
    model, x = build(True, 32, 48, {}), torch.randn(2, 3, 32)
    _, state = model.prefill(x[:1])
    y, _ = model.step(x[1], state)
    y.sum().backward()
    assert model.key.linear.weight.grad is not None


def test_what_does_not_fit_is_left_to_the_plain_form() -> None:
    p = problem("shared")
    assert not kernel.fits(double(p))
    assert not kernel.fits(p._replace(noise=[p.x] * 4))
    assert not kernel.fits(p._replace(x=p.x[..., :24]))
    assert not kernel.fits(p._replace(x=p.x[:0]))

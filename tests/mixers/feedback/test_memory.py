"""The stack, and the state of decoding."""

import copy
import threading

import pytest
import torch
from models import build, sequence

from postil.mixers.feedback import FeedbackState, Stack


def recurrence(rows: torch.Tensor, stack: Stack) -> torch.Tensor:
    """Each step reads all rows before it and appends one more."""
    outputs, h = [], rows[0]
    for n, row in enumerate(rows):
        stack.append(n, h * row)
        h = torch.tanh(stack.get().sum(dim=0) * row)
        outputs.append(h)
    return torch.stack(outputs)


def with_lists(rows: torch.Tensor) -> torch.Tensor:
    outputs, h, memory = [], rows[0], []
    for row in rows:
        memory.append(h * row)
        h = torch.tanh(torch.stack(memory).sum(dim=0) * row)
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("max_len", [1, 3, 512])
def test_a_stack_equals_stacking(max_len: int) -> None:
    rows = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    y, expected = recurrence(rows, Stack(max_len)), with_lists(rows)
    assert torch.equal(y, expected)
    # Of every single position, not of the sum alone: steps whose output nobody uses must not matter.
    for t in range(9):
        a = torch.autograd.grad(y[t].sum(), rows, retain_graph=True)[0]
        b = torch.autograd.grad(expected[t].sum(), rows, retain_graph=True)[0]
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_stack_serves_two_passes_before_a_backward() -> None:
    stack = Stack(4)
    first, second = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    one, two = recurrence(first, stack), recurrence(second, stack)
    for rows, y in ((first, one), (second, two), (first, one)):
        gradient = torch.autograd.grad(y.square().sum(), rows, retain_graph=True)[0]
        expected = torch.autograd.grad(with_lists(rows).square().sum(), rows)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_second_derivatives_of_a_stack() -> None:
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda rows: recurrence(rows, Stack(2)), rows)


def test_appending_to_an_earlier_row_leaves_what_was_read() -> None:
    stack = Stack(8)
    for n in range(3):
        stack.append(n, torch.full((2,), float(n)))
    read = stack.get()
    stack.append(1, torch.full((2,), 9.0))
    assert read[:, 0].tolist() == [0, 1, 2]
    assert stack.get()[:, 0].tolist() == [0, 9]


def test_a_stack_refuses_gaps_and_other_shapes() -> None:
    stack = Stack(2)
    with pytest.raises(ValueError, match="empty"):
        stack.get()
    with pytest.raises(ValueError, match=r"row 1 .* stack of 0"):
        stack.append(1, torch.zeros(2))
    stack.append(0, torch.zeros(2))
    with pytest.raises(ValueError, match="shape"):
        stack.append(1, torch.zeros(3))
    stack.free()
    with pytest.raises(ValueError, match="empty"):
        stack.get()


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_keeps_the_state_small(window: int) -> None:
    model, x = build(window=window), sequence(100, 2)
    state, rows = None, []
    for x_t in x:
        y_t, state = model.step(x_t, state)
        rows.append(y_t)
        assert state.stop - state.start <= window
        assert state.keys.shape[0] <= 2 * window
    torch.testing.assert_close(torch.stack(rows), model(x), rtol=1e-10, atol=1e-10)
    _, state = model.prefill(x)
    assert state.keys.untyped_storage().nbytes() == window * state.keys[0].numel() * 8


@torch.no_grad()
def test_two_continuations_of_one_state_part_ways() -> None:
    model, x = build(), sequence(8, 2)
    _, state = model.prefill(x[:4])
    _, state = model.step(x[4], state)
    _, left = model.step(x[5], state)
    _, right = model.step(x[6], state)
    y, _ = model.step(x[7], left)
    expected = model(torch.cat([x[:6], x[7:]]))[-1]
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    assert left.stop == right.stop


@torch.no_grad()
def test_threads_that_continue_one_state_do_not_meet() -> None:
    model, x = build(), sequence(40, 1)
    _, state = model.prefill(x[:4])
    _, state = model.step(x[4], state)
    wrong = []

    def continue_alone(k: int) -> None:
        own, rows = state, [*x[:5]]
        for x_t in torch.roll(x, k, dims=0)[:20]:
            y, own = model.step(x_t, own)
            rows.append(x_t)
        if not torch.allclose(y, model(torch.stack(rows))[-1], rtol=1e-10, atol=1e-10):
            wrong.append(k)

    threads = [threading.Thread(target=continue_alone, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_state_copies_and_outlives_inference_mode() -> None:
    model, x = build(), sequence(6, 2)
    with torch.inference_mode():
        _, state = model.prefill(x[:3])
        _, state = model.step(x[3], state)
    with torch.no_grad():
        expected = model(x[:5])[-1]
        for own in (state, copy.deepcopy(state)):
            torch.testing.assert_close(model.step(x[4], own)[0], expected, rtol=1e-10, atol=1e-10)


def test_gradients_flow_through_steps() -> None:
    model, x = build(window=4), sequence(7, 2).requires_grad_()
    state: FeedbackState | None = None
    rows = []
    for x_t in x:
        y_t, state = model.step(x_t, state)
        rows.append(y_t)
    gradient = torch.autograd.grad(torch.stack(rows).square().sum(), x)[0]
    expected = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)

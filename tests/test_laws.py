"""The eight laws of the house, over every entry of the registry.

A mixer and a whole backbone are driven through one face (`Model`), so a new entry is held to all of them
without a line written here.
"""

import copy
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from postil.masks import Mask
from postil.registry import REGISTRY

NAMES = sorted(REGISTRY)
LENGTH = 12
CAUSAL = Mask(causal=True)


class Model:
    """A registry entry built small: `run` is the causal whole-sequence form of mixers and backbones alike."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64, seq_len: int = 32):
        self.entry = REGISTRY[name]
        self.module = self.entry.build(replace(self.entry.example, seq_len=seq_len)).to(dtype)
        self.dtype = dtype
        perturb(self.module)

    def run(self, x: Tensor, mask: Mask | Tensor = CAUSAL) -> Tensor:
        if self.entry.is_backbone:
            return self.module(x, mask)
        return self.module(query=x, key=x, value=x, mask=mask)

    def operands(self, x: Tensor, mask: Mask | Tensor = CAUSAL) -> tuple:
        if self.entry.is_backbone:
            return self.module.operands(x, mask)
        return self.module.operands(query=x, key=x, value=x, mask=mask)

    def input(self, length: int = LENGTH, batch: int = 3) -> Tensor:
        return torch.randn(length, batch, self.entry.example.d_model, dtype=torch.float64).to(self.dtype)


def perturb(module: nn.Module) -> None:
    """Move tables that start at zero, or no test would see them."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def relative_error(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference over that of the truth."""
    a, b = a.double(), b.double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp_min(1e-30))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# Laws 1 and 2: decoding is the same function.


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@torch.no_grad()
def test_stepping_equals_forward(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = Model(name, dtype)
    x = model.input()
    state, rows = None, []
    for x_t in x:
        y_t, state = model.module.step(x_t, state)
        rows.append(y_t)
    torch.testing.assert_close(torch.stack(rows), model.run(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("cut", range(LENGTH + 1))
@torch.no_grad()
def test_prefill_anywhere_then_stepping_equals_forward(
    name: str, cut: int, dtype: torch.dtype, tolerance: float
) -> None:
    model = Model(name, dtype)
    x = model.input()
    head, state = model.module.prefill(x[:cut])
    rows = [*head]
    for x_t in x[cut:]:
        y_t, state = model.module.step(x_t, state)
        rows.append(y_t)
    torch.testing.assert_close(torch.stack(rows), model.run(x), rtol=tolerance, atol=tolerance)


@pytest.mark.case("BC008", "BC009")
@torch.no_grad()
def test_chunks_of_any_size_equal_forward(name: str) -> None:
    model = Model(name, seq_len=300)
    x = model.input(length=300, batch=2)
    whole = model.run(x)
    state, position = None, 0
    for size in (5, 3, 1, 4, 0, 130, 1, 1, 140, 15):
        y, state = model.module.prefill(x[position : position + size], state)
        torch.testing.assert_close(y, whole[position : position + size], rtol=1e-10, atol=1e-10)
        position += size
    assert position == 300


# Law 3: the past does not move.


@pytest.mark.case("BC005", "BC018")
@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("length", [7, 64, 257])
@torch.no_grad()
def test_the_past_is_bit_identical_under_any_future(name: str, length: int, size: float) -> None:
    model = Model(name, torch.float32, seq_len=length)
    x = model.input(length)
    for changed in {length - 1, length // 2, 5}:
        y = x.clone()
        y[changed] += size
        before, after = model.run(x), model.run(y)
        assert torch.equal(before[:changed], after[:changed])
        assert not torch.equal(before[changed:], after[changed:])


@pytest.mark.case("BC018")
def test_the_past_stays_with_dropout_on(name: str) -> None:
    entry = REGISTRY[name]
    module = entry.build(replace(entry.example, dropout=0.3))
    model = Model.__new__(Model)
    model.entry, model.module, model.dtype = entry, module.train(), torch.float32
    x = model.input()
    y = x.clone()
    y[-1] += 10
    torch.manual_seed(1)
    before = model.run(x)
    torch.manual_seed(1)
    after = model.run(y)
    assert torch.equal(before[:-1], after[:-1])


# Law 4: fast equals reference.


MASKS = {
    "causal": lambda t, b: Mask(causal=True),
    "causal, padded": lambda t, b: Mask.padding(torch.tensor([t, t // 2, 1][:b]), t, causal=True),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_fast_equals_reference_with_every_gradient(name: str, mask: str, length: int) -> None:
    model = Model(name, seq_len=40)
    x = model.input(length).requires_grad_()
    inputs = [x, *model.module.parameters()]
    results = []
    for form in (model.entry.fast, model.entry.reference):
        y = form(*model.operands(x, MASKS[mask](length, 3)))
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
        gradients = torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True)
        results.append([y, *gradients])
    for fast, reference in zip(*results, strict=True):
        assert (fast is None) == (reference is None)
        if fast is not None:
            torch.testing.assert_close(fast, reference, rtol=1e-10, atol=1e-10)


def test_gradcheck(name: str) -> None:
    model = Model(name, seq_len=6)
    x = model.input(length=5, batch=2).requires_grad_()
    mask = Mask(causal=True, keys=torch.tensor([[1, 0], [1, 0], [1, 1], [1, 1], [0, 1]], dtype=torch.bool))
    parameters = [p for p in model.module.parameters() if p.requires_grad]

    def run(x: Tensor, *_: Tensor) -> Tensor:
        return model.run(x, mask)

    assert torch.autograd.gradcheck(run, (x, *parameters), eps=1e-6, atol=1e-5, rtol=1e-3)


# Where both forms round to the last bit alike, twice nothing would be nothing: two units of the last place
# are granted on top, as the tests of FlashAttention do.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_low_precision_costs_at_most_twice_the_references_own_error(name: str, dtype: torch.dtype) -> None:
    exact = Model(name)
    low = copy.deepcopy(exact.module).to(dtype)
    x = exact.input(length=30)
    truth = exact.entry.reference(*exact.operands(x))
    exact.module = low
    operands = exact.operands(x.to(dtype))
    fast, reference = exact.entry.fast(*operands), exact.entry.reference(*operands)
    floor = 2 * torch.finfo(dtype).eps
    assert relative_error(fast, truth) <= 2 * relative_error(reference, truth) + floor


# Law 5: finite, whatever comes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1, 30, 100, 1000])
def test_everything_stays_finite(name: str, magnitude: float, dtype: torch.dtype) -> None:
    model = Model(name, dtype)
    x = (magnitude * model.input()).requires_grad_()
    y = model.run(x)
    y.float().sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None and x.grad.isfinite().all()
    for parameter in model.module.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


# Law 6: rows do not know of each other, nor of padding.


@pytest.mark.case("BC034")
@torch.no_grad()
def test_a_batch_row_equals_that_row_alone(name: str) -> None:
    model = Model(name, torch.float32)
    x = model.input(batch=4)
    together = model.run(x)
    for row in range(4):
        alone = model.run(x[:, row : row + 1])
        torch.testing.assert_close(alone, together[:, row : row + 1], rtol=1e-6, atol=1e-6)
    shuffle = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model.run(x[:, shuffle]), together[:, shuffle], rtol=1e-6, atol=1e-6)


@pytest.mark.case("BC029")
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
@torch.no_grad()
def test_padding_changes_nothing_whatever_it_holds(name: str, junk: float) -> None:
    model = Model(name, torch.float32)
    x = model.input()
    mask = Mask.padding(torch.tensor([LENGTH, 5, 1]), LENGTH, causal=True)
    zeros, junks = x.clone(), x.clone()
    assert mask.keys is not None
    zeros[~mask.keys] = 0.0
    junks[~mask.keys] = junk
    clean, dirty = model.run(zeros, mask), model.run(junks, mask)
    assert torch.equal(clean[mask.keys], dirty[mask.keys])
    for row, length in enumerate((LENGTH, 5, 1)):
        alone = model.run(x[:length, row : row + 1])
        torch.testing.assert_close(dirty[:length, row : row + 1], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.case("BC001", "BC002", "BC004")
def test_rows_that_may_read_nothing_give_finite_gradients(name: str) -> None:
    model = Model(name, torch.float32)
    x = model.input(batch=2).requires_grad_()
    keys = torch.ones(LENGTH, 2, dtype=torch.bool)
    keys[:3, 1] = False
    y = model.run(x, Mask(causal=True, keys=keys))
    assert y.isfinite().all()
    # The loss leaves the empty rows out; their gradient must still not poison the others.
    y[3:].sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    for parameter in model.module.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
    assert (x.grad[:3, 1] == 0).all()


# Law 7: nothing is remembered that was not handed over.


@torch.no_grad()
def test_a_state_can_be_replayed(name: str) -> None:
    model = Model(name)
    x = model.input()
    _, state = model.module.prefill(x[:6])
    _, state = model.module.step(x[6], state)
    one, _ = model.module.step(x[7], state)
    other, forked = model.module.step(-x[7], state)
    again, kept = model.module.step(x[7], state)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    # Both continuations live on, each with its own past.
    straight = model.run(torch.cat([x[:8], x[8:9]]))[-1]
    torch.testing.assert_close(model.module.step(x[8], kept)[0], straight, rtol=1e-10, atol=1e-10)
    parted = model.run(torch.cat([x[:7], -x[7:8], x[8:9]]))[-1]
    torch.testing.assert_close(model.module.step(x[8], forked)[0], parted, rtol=1e-10, atol=1e-10)


@pytest.mark.case("BC024")
def test_forwards_and_backwards_in_any_order(name: str) -> None:
    model = Model(name)
    x, z = model.input().requires_grad_(), model.input().requires_grad_()
    expected_x = torch.autograd.grad(model.run(x).square().sum(), x)[0]
    expected_z = torch.autograd.grad(model.run(z).square().sum(), z)[0]
    first, second = model.run(x).square().sum(), model.run(z).square().sum()
    with torch.no_grad():
        model.run(model.input())
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(first, x, retain_graph=True)[0], expected_x)
        assert torch.equal(torch.autograd.grad(second, z, retain_graph=True)[0], expected_z)


def test_copies_threads_and_inference_mode(name: str) -> None:
    model = Model(name)
    x = model.input()
    expected = model.run(x)
    with torch.inference_mode():
        assert torch.equal(model.run(x), expected)
    model.run(x.clone().requires_grad_()).sum().backward()
    twin = copy.deepcopy(model.module)
    original, model.module = model.module, twin
    assert torch.equal(model.run(x), expected)
    model.module = original
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(model.run(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)
    narrow = original.to(torch.float32)
    model.module = narrow
    assert model.run(x.float()).dtype == torch.float32


@pytest.mark.case("BC035")
@torch.no_grad()
def test_strides_do_not_matter_and_inputs_stay(name: str) -> None:
    model = Model(name)
    x = model.input()
    expected, kept = model.run(x), x.clone()
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    strided = torch.stack([x, x], dim=-1).flatten(-2)[..., ::2]
    for view in (transposed, strided):
        assert not view.is_contiguous()
        assert torch.equal(model.run(view), expected)
    expanded = x[:, :1].expand(-1, 3, -1)
    assert torch.equal(model.run(expanded), model.run(expanded.contiguous()))
    assert torch.equal(x, kept)


@pytest.mark.case("BC031", "BC034")
@pytest.mark.parametrize(("length", "batch"), [(0, 2), (5, 0), (1, 2), (1, 1)])
def test_empty_and_single_sequences(name: str, length: int, batch: int) -> None:
    model = Model(name)
    x = model.input(length, batch).requires_grad_()
    y = model.run(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    if x.numel():
        torch.testing.assert_close(y[:, :1], model.run(x[:, :1]), rtol=1e-10, atol=1e-10)


@pytest.mark.case("BC038")
@torch.no_grad()
def test_eval_mode_is_deterministic_and_without_dropout(name: str) -> None:
    entry = REGISTRY[name]
    with_dropout = entry.build(replace(entry.example, dropout=0.5)).eval()
    without = entry.build(entry.example)
    without.load_state_dict(with_dropout.state_dict())
    model = Model(name, torch.float32)
    x = model.input()
    outputs = []
    for module in (with_dropout, with_dropout, without):
        model.module = module
        outputs.append(model.run(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


# Law 8: parameters are parameters.


def test_every_parameter_keeps_its_identity_and_learns(name: str) -> None:
    model = Model(name, torch.float32)
    before = {key: (id(p), p.detach().clone()) for key, p in model.module.named_parameters()}
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.run(model.input(length=32)).square().mean().backward()
        optimizer.step()
    for key, parameter in model.module.named_parameters():
        identity, value = before[key]
        assert id(parameter) == identity
        moved = (parameter - value).abs().max()
        assert (moved > 1e-6) == (key not in model.entry.idle), f"{key} moved by {moved}"


def test_a_state_dict_goes_round(name: str) -> None:
    model, other = Model(name), Model(name)
    x = model.input()
    expected = model.run(x)
    other.module.load_state_dict(model.module.state_dict(), strict=True)
    assert torch.equal(other.run(x), expected)


def test_reset_parameters_draws_anew(name: str) -> None:
    entry = REGISTRY[name]
    module = entry.build(entry.example)
    torch.manual_seed(1)
    other = entry.build(entry.example)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            perturb(part)
    torch.manual_seed(1)
    module.reset_parameters()
    drawn = {key for key, p in other.named_parameters() if p.std() > 0}
    for key, parameter in module.named_parameters():
        spread = parameter.std() if parameter.numel() > 1 else torch.tensor(0.0)
        assert (spread > 0) == (key in drawn), f"{key} was left as it was"


# The shape checks that run under pytest cannot be traced, so this law runs in a process without them.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(name: str, backend: str) -> None:
    script = Path(__file__).parent / "compiled_law.py"
    done = subprocess.run([sys.executable, str(script), name, backend], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Fast equals reference: every member, every mask, values and all gradients."""

import pytest
import torch
from torch import Tensor

from conftest import MEMBERS, Member
from postil.masks import Mask, dense_mask


def masks(t: int, s: int, b: int) -> dict[str, Mask]:
    return {
        "full": Mask(),
        "causal": Mask(causal=True),
        "causal behind others": Mask(causal=True, offset=max(0, s - t)),
        "causal behind a line": Mask(causal=True, offset=4),
        "padded": Mask(keys=torch.rand(s, b) > 0.4),
        "causal, padded": Mask(causal=True, keys=torch.rand(s, b) > 0.4),
        "window": Mask(window=4),
        "window wider than the biases": Mask(causal=True, window=40),
        "window, padded": Mask(causal=True, window=3, keys=torch.rand(s, b) > 0.4),
        "dense": Mask(dense=torch.rand(t, s, b) > 0.5),
        "dense for all rows": Mask(dense=torch.rand(t, s, 1) > 0.5),
        "dense for all queries": Mask(dense=torch.rand(1, s, b) > 0.5),
        "everything": Mask(True, torch.rand(s, b) > 0.3, torch.rand(t, s, b) > 0.3, 7, 2),
        "nothing": Mask(dense=torch.zeros(t, s, 1, dtype=torch.bool)),
        "all padding": Mask(causal=True, keys=torch.zeros(s, b, dtype=torch.bool)),
    }


def values_and_gradients(form, operands: list, mask: Mask) -> list[Tensor]:
    y = form(*operands, mask)
    leaves = [x for x in operands if isinstance(x, Tensor)]
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad((y * weight).sum(), leaves)]


@pytest.mark.case("BC001", "BC002", "BC004")
@pytest.mark.parametrize("mask", masks(1, 1, 1))
@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 9), (6, 6), (19, 19), (5, 21), (21, 5), (7, 150)])
def test_fast_equals_reference_under_every_mask(member: Member, mask: str, t: int, s: int) -> None:
    rules = masks(t, s, 2)[mask]
    operands = member.operands(t, s, 2, rules.offset)
    fast, reference = (values_and_gradients(f, operands, rules) for f in (member.fast, member.reference))
    for a, b in zip(fast, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    empty = ~dense_mask(rules, t, s).any(dim=1)
    assert (fast[0][empty.expand(t, 2)] == 0).all()


@pytest.mark.parametrize("mask", ["full", "causal", "causal, padded"])
def test_many_chunks_equal_reference(member: Member, mask: str) -> None:
    length = 600
    rules = masks(1, length, 1)[mask]
    operands = member.operands(length, length, 1)
    fast, reference = (values_and_gradients(f, operands, rules) for f in (member.fast, member.reference))
    for a, b in zip(fast, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


# Chunks are as long as the cache likes; columns are taken in tiles. Neither may be seen in the result.
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 4), (32, 1024)])
def test_chunks_and_tiles_do_not_show(
    member: Member, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from postil.mixers.aft import gated_mean, walk

    for module in (walk, gated_mean):
        monkeypatch.setattr(module, "ROWS", rows)
        monkeypatch.setattr(module, "COLUMNS", columns)
    for mask in (Mask(), Mask(causal=True), Mask(causal=True, offset=12, keys=torch.rand(90, 2) > 0.3)):
        operands = member.operands(78, 90, 2, mask.offset)
        fast, reference = (values_and_gradients(f, operands, mask) for f in (member.fast, member.reference))
        for a, b in zip(fast, reference, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(dense=torch.rand(5, 5, 1) > 0.4)])
def test_gradients_and_their_gradients(member: Member, mask: Mask) -> None:
    operands = member.operands(5, 5, 1)  # an odd block, a window edge
    leaves = [x for x in operands if isinstance(x, Tensor)]

    def run(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        return member.fast(*(next(given) if isinstance(x, Tensor) else x for x in operands), mask)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def test_function_transforms(member: Member) -> None:
    operands = member.operands(6, 6, 3)
    q, k, v, *biases = (x.detach() if isinstance(x, Tensor) else x for x in operands)

    def loss(form):
        return lambda q, k, v: form(q, k, v, *biases, Mask(causal=True)).square().sum()

    fast, reference = (
        torch.func.grad(loss(f), argnums=(0, 1, 2))(q, k, v) for f in (member.fast, member.reference)
    )
    for a, b in zip(fast, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    # Gradients for each sample of a batch, all at once.
    batch = [x[:, :, None].transpose(0, 1) for x in (q, k, v)]
    each = torch.func.vmap(torch.func.grad(loss(member.fast), argnums=(0, 1, 2)))(*batch)
    for a, b in zip(each, fast, strict=True):
        torch.testing.assert_close(a[:, :, 0].transpose(0, 1), b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [1, 2, 32, 48, 100])
def test_every_window(window: int) -> None:
    member = MEMBERS["local"]
    for mask in (Mask(), Mask(causal=True)):
        operands = [*member.operands(90, 90, 1)[:3], torch.randn(90, 2 * window - 1, dtype=torch.float64)]
        operands[3].requires_grad_()
        fast, reference = (values_and_gradients(f, operands, mask) for f in (member.fast, member.reference))
        for a, b in zip(fast, reference, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "centre"), [(1, 0), (2, 0), (4, 3), (7, 3), (40, 39), (40, 20)])
def test_every_kernel(size: int, centre: int) -> None:
    member = MEMBERS["conv"]
    for mask in (Mask(), Mask(causal=True), Mask(window=3)):
        operands = [
            *member.operands(50, 50, 2)[:3],
            torch.randn(2, size, dtype=torch.float64).requires_grad_(),
            centre,
        ]
        fast, reference = (values_and_gradients(f, operands, mask) for f in (member.fast, member.reference))
        for a, b in zip(fast, reference, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# Near and far are never subtracted from each other, so a window that is all but closed keeps its digits.
@pytest.mark.parametrize("level", [-5.0, -20.0, -45.0, -80.0])
@pytest.mark.parametrize("name", ["local", "conv", "conv2d"])
def test_strongly_negative_biases_do_not_cancel(name: str, level: float) -> None:
    member = MEMBERS[name]
    operands = [x.detach() if isinstance(x, Tensor) else x for x in member.operands(40, 40, 2)]
    operands[3] = operands[3] + level
    for mask in (Mask(), Mask(causal=True)):
        truth = member.reference(*operands, mask)
        single = [x.float() if isinstance(x, Tensor) else x for x in operands]
        torch.testing.assert_close(member.fast(*single, mask).double(), truth, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(member.fast(*operands, mask), truth, rtol=1e-10, atol=1e-12)

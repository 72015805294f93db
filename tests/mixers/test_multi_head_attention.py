"""Multi-head attention beyond the common laws: its contract, its hooks, its masks."""

import math

import pytest
import torch
from torch import Tensor, nn

from postil.masks import Mask, dense_mask
from postil.mixer import BatchFirst
from postil.mixers.multi_head_attention import (
    MultiHeadAttention,
    PrepareForMultiHeadAttention,
    attention,
    attention_reference,
)


def heads(length: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(length, batch, 3, 4, dtype=dtype)


def module(dtype: torch.dtype = torch.float64, **options) -> MultiHeadAttention:
    return MultiHeadAttention(4, 16, **{"dropout_prob": 0.0, **options}).to(dtype)


def test_prepare_splits_the_last_axis_of_sequences_and_single_positions() -> None:
    prepare = PrepareForMultiHeadAttention(16, 4, 5, bias=False)
    assert prepare(torch.randn(7, 2, 16)).shape == (7, 2, 4, 5)
    assert prepare(torch.randn(2, 16)).shape == (2, 4, 5)
    assert prepare.linear.bias is None


def test_bias_governs_query_and_key_only() -> None:
    m = module(bias=False)
    assert m.query.linear.bias is None and m.key.linear.bias is None
    assert m.value.linear.bias is not None and m.output.bias is not None


def random_masks(t: int, s: int, b: int) -> dict[str, Mask]:
    return {
        "full": Mask(),
        "causal": Mask(causal=True),
        "causal behind others": Mask(causal=True, offset=max(0, s - t)),
        "padded": Mask(keys=torch.rand(s, b) > 0.4),
        "dense": Mask(dense=torch.rand(t, s, b) > 0.5),
        "dense for all rows": Mask(dense=torch.rand(t, s, 1) > 0.5),
        "dense for all queries": Mask(dense=torch.rand(1, s, b) > 0.5),
        "window": Mask(window=5),
        "causal window, padded": Mask(causal=True, window=5, keys=torch.rand(s, b) > 0.4),
        "everything": Mask(True, torch.rand(s, b) > 0.3, torch.rand(t, s, b) > 0.3, 7, 2),
        "nothing": Mask(dense=torch.zeros(t, s, 1, dtype=torch.bool)),
    }


@pytest.mark.case("BC001", "BC002", "BC004")
@pytest.mark.parametrize("mask", random_masks(1, 1, 1))
@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 9), (6, 6), (5, 11), (11, 5), (300, 300), (150, 320)])
def test_fast_equals_reference_under_every_mask(mask: str, t: int, s: int) -> None:
    q, k, v = heads(t).requires_grad_(), heads(s).requires_grad_(), heads(s).requires_grad_()
    rules = random_masks(t, s, 2)[mask]
    results = []
    for form in (attention, attention_reference):
        y = form(q, k, v, rules)
        results.append((y, *torch.autograd.grad(y.sin().sum(), (q, k, v))))
    for fast, reference in zip(*results, strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-10, atol=1e-10)
    empty = ~dense_mask(rules, t, s).any(dim=1)
    assert (results[0][0][empty.expand(t, 2)] == 0).all()


@pytest.mark.case("BC002", "BC004")
def test_a_key_that_nobody_may_read_gets_exactly_no_gradient() -> None:
    q, k, v = heads(6).requires_grad_(), heads(6).requires_grad_(), heads(6).requires_grad_()
    allowed = torch.rand(6, 6, 2) > 0.3
    allowed[:, 2] = False
    allowed[4] = False
    y = attention(q, k, v, Mask(dense=allowed))
    rows = [0, 1, 2, 3, 5]
    y[rows].square().sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and x.grad.isfinite().all()
    assert (k.grad[2] == 0).all() and (v.grad[2] == 0).all() and (q.grad[4] == 0).all()
    kept = attention(q[rows], k, v, Mask(dense=allowed[rows]))
    torch.testing.assert_close(kept, y[rows], rtol=1e-10, atol=1e-10)


def test_reference_is_twice_differentiable() -> None:
    q, k, v = (heads(3, 1).requires_grad_() for _ in range(3))
    mask = Mask(causal=True)
    assert torch.autograd.gradgradcheck(lambda q, k, v: attention_reference(q, k, v, mask), (q, k, v))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_equal_to_torch(bias: bool, causal: bool) -> None:
    ours = module(bias=True)
    theirs = nn.MultiheadAttention(16, 4, bias=True, dtype=torch.float64)
    with torch.no_grad():
        parts = (ours.query.linear, ours.key.linear, ours.value.linear)
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    x = torch.randn(9, 3, 16, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(9, 3, 16, dtype=torch.float64, requires_grad=True)
    real = torch.rand(9, 3) > 0.2
    real[0] = True
    blocked = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else None
    expected, weights = theirs(
        x, memory, memory, key_padding_mask=~real.T, attn_mask=blocked, average_attn_weights=False
    )
    mask = Mask(causal=causal, keys=real)
    y = ours(query=x, key=memory, value=memory, mask=mask)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    gradients = zip(
        torch.autograd.grad(y.sin().sum(), (x, memory)),
        torch.autograd.grad(expected.sin().sum(), (x, memory)),
        strict=True,
    )
    for a, b in gradients:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    own = ours.weights(query=x, key=memory, mask=mask)
    torch.testing.assert_close(own, weights.permute(2, 3, 0, 1), rtol=1e-10, atol=1e-10)


def test_weights_are_before_dropout_and_kept_by_nobody() -> None:
    m = module(dropout_prob=0.5).train()
    x = torch.randn(6, 2, 16, dtype=torch.float64)
    weights = m.weights(query=x, key=x, mask=Mask(causal=True))
    assert weights.shape == (6, 6, 2, 4)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(6, 2, 4, dtype=torch.float64))
    m(query=x, key=x, value=x)
    assert not [value for value in vars(m).values() if isinstance(value, Tensor)]


# A subclass with another score, after Shaw et al. 2018: a learned vector for every distance.
class RelativeAttention(MultiHeadAttention):
    def __init__(self, heads: int, d_model: int, reach: int = 8, **options):
        super().__init__(heads, d_model, **options)
        self.reach = reach
        self.distance = nn.Parameter(torch.randn(2 * reach + 1, self.d_k, dtype=torch.float64))

    def get_scores(self, query: Tensor, key: Tensor) -> Tensor:
        t, s = query.shape[0], key.shape[0]
        lag = (torch.arange(t)[:, None] + s - t - torch.arange(s)[None, :]).clamp(-self.reach, self.reach)
        by_distance = torch.einsum("ibhe,ije->ijbh", query, self.distance[lag + self.reach])
        return super().get_scores(query, key) + by_distance


@pytest.mark.parametrize("window", [None, 4])
def test_a_subclass_that_overrides_the_scores_changes_the_result_everywhere(window: int | None) -> None:
    relative = RelativeAttention(4, 16, dropout_prob=0.0, window=window).double()
    plain = module(window=window)
    plain.load_state_dict(relative.state_dict(), strict=False)
    x = torch.randn(10, 2, 16, dtype=torch.float64)
    mask = Mask(causal=True)
    y = relative(query=x, key=x, value=x, mask=mask)
    assert not torch.allclose(y, plain(query=x, key=x, value=x, mask=mask))
    with torch.no_grad():
        head, state = relative.prefill(x[:4])
        rows = [*head]
        for x_t in x[4:]:
            row, state = relative.step(x_t, state)
            rows.append(row)
    torch.testing.assert_close(torch.stack(rows), y, rtol=1e-10, atol=1e-10)
    y.sum().backward()
    assert relative.distance.grad is not None and relative.distance.grad.abs().sum() > 0


def test_a_subclass_that_overrides_the_mask_changes_the_result() -> None:
    class Diagonal(MultiHeadAttention):
        def prepare_mask(self, mask, query_shape, key_shape):
            own = torch.eye(query_shape[0], key_shape[0], dtype=torch.bool)[:, :, None, None]
            return super().prepare_mask(mask, query_shape, key_shape) & own

    m = Diagonal(4, 16, dropout_prob=0.0).double()
    x = torch.randn(5, 2, 16, dtype=torch.float64)
    y = m(query=x, key=x, value=x, mask=Mask(causal=True))
    torch.testing.assert_close(y, m.output(m.value(x).flatten(-2)))


@pytest.mark.case("BC005")
def test_the_inverted_mask_gives_another_result_and_leaks() -> None:
    m = module()
    x = torch.randn(6, 1, 16, dtype=torch.float64)
    right = torch.ones(6, 6, dtype=torch.bool).tril()[:, :, None]
    inverted = ~right
    y = m(query=x, key=x, value=x, mask=right)
    assert torch.equal(y, m(query=x, key=x, value=x, mask=Mask(dense=right)))
    changed = x.clone()
    changed[5] += 1
    assert torch.equal(m(query=changed, key=changed, value=changed, mask=right)[:5], y[:5])
    wrong = m(query=x, key=x, value=x, mask=inverted)
    assert not torch.equal(m(query=changed, key=changed, value=changed, mask=inverted)[:5], wrong[:5])


def test_integer_masks_mean_the_same_as_boolean_ones() -> None:
    m = module()
    x = torch.randn(6, 1, 16, dtype=torch.float64)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()[:, :, None]
    boolean = m(query=x, key=x, value=x, mask=allowed)
    assert torch.equal(boolean, m(query=x, key=x, value=x, mask=allowed.long() * 3))


@pytest.mark.case("BC006")
def test_a_float_mask_is_refused_with_the_remedy() -> None:
    x = torch.randn(4, 1, 16, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"torch.float32.*boolean or integer.*mask.bool\(\)"):
        module()(query=x, key=x, value=x, mask=torch.ones(4, 4).tril()[:, :, None])


@pytest.mark.case("BC033")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4, "d_model": 30}, "d_model=30 must be divisible by heads=4"),
        ({"heads": 0, "d_model": 30}, "heads=0"),
        ({"heads": 3, "d_model": 30, "dropout_prob": 1.5}, "dropout_prob=1.5"),
        ({"heads": 3, "d_model": 30, "window": 0}, "window=0"),
    ],
)
def test_impossible_sizes_are_refused_at_construction(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**options)


@pytest.mark.parametrize(
    ("query", "key", "value", "message"),
    [
        ((4, 2, 16), (5, 2, 16), (6, 2, 16), r"key \[5, 2, 16\] and value \[6, 2, 16\]"),
        ((4, 1, 16), (5, 2, 16), (5, 2, 16), r"query \[4, 1, 16\] and key \[5, 2, 16\]"),
        ((4, 2, 16), (5, 2, 16), (5, 1, 16), r"key \[5, 2, 16\] and value \[5, 1, 16\]"),
        ((4, 2, 8), (5, 2, 8), (5, 2, 8), "d_model=16"),
    ],
)
def test_shapes_that_would_broadcast_silently_are_refused(query, key, value, message: str) -> None:
    m = MultiHeadAttention.__call__
    with pytest.raises((ValueError, TypeError), match=rf"{message}|Type-check error"):
        m(module(), query=torch.randn(query), key=torch.randn(key), value=torch.randn(value))
    with pytest.raises(ValueError, match=message):
        module().operands(query=torch.randn(query), key=torch.randn(key), value=torch.randn(value))


@pytest.mark.parametrize("shape", [(3, 4, 2), (4, 5, 2), (4, 4, 3)])
def test_a_mask_that_does_not_fit_names_its_shape(shape: tuple[int, ...]) -> None:
    x = torch.randn(4, 2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=str(list(shape))[1:-1]):
        module()(query=x, key=x, value=x, mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.case("BC013")
def test_float16_scores_do_not_overflow_in_either_form() -> None:
    q = torch.full((1, 1, 1, 64), 64.0, dtype=torch.float16)
    k = torch.full((2, 1, 1, 64), 64.0, dtype=torch.float16)
    v = torch.tensor([0.0, 1.0], dtype=torch.float16)[:, None, None, None].expand(2, 1, 1, 64)
    for form in (attention, attention_reference):
        assert torch.equal(form(q, k, v, Mask()), torch.full_like(q, 0.5))
    general = MultiHeadAttention(1, 64, dropout_prob=0.0)
    assert torch.equal(general._weights(q, k, Mask()), torch.full((1, 2, 1, 1), 0.5, dtype=torch.float16))


@pytest.mark.case("BC029")
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_junk_in_padding_reaches_neither_outputs_nor_weight_gradients(junk: float) -> None:
    m = module()
    x = torch.randn(6, 2, 16, dtype=torch.float64)
    real = torch.ones(6, 2, dtype=torch.bool)
    real[4:, 1] = False
    x[~real] = junk
    y = m(query=x, key=x, value=x, mask=Mask(causal=True, keys=real))
    assert y.isfinite().all()
    y[real].sum().backward()
    for parameter in m.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


@pytest.mark.parametrize("window", [1, 3, 8])
@torch.no_grad()
def test_the_state_of_a_window_stays_small(window: int) -> None:
    m = module(window=window)
    x = torch.randn(500, 1, 16, dtype=torch.float64)
    y = m(query=x, key=x, value=x, mask=Mask(causal=True))
    state, rows = None, []
    for x_t in x:
        row, state = m.step(x_t, state)
        rows.append(row)
    torch.testing.assert_close(torch.stack(rows), y, rtol=1e-10, atol=1e-10)
    assert state is not None and state.keys.shape[0] <= 64
    assert state.stop - state.start == window - 1


@torch.no_grad()
def test_a_batch_that_changes_in_the_middle_is_refused() -> None:
    m = module()
    _, state = m.prefill(torch.randn(3, 2, 16, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"batch of 2.*batch of 3"):
        m.step(torch.randn(3, 16, dtype=torch.float64), state)


def test_batch_first_transposes_in_and_out() -> None:
    m = module()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    t = x.transpose(0, 1)
    y = BatchFirst(m)(query=x, key=x, value=x, mask=Mask(causal=True))
    assert torch.equal(y, m(query=t, key=t, value=t, mask=Mask(causal=True)).transpose(0, 1))
    positional = BatchFirst(nn.Sequential())
    with pytest.raises(TypeError):
        positional(x, mask=Mask())

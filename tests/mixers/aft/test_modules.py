"""The modules: constructors, checkpoints, decoding, clear errors."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from conftest import CAUSAL, Member, perturbed
from postil.masks import Mask
from postil.mixers.aft import AFTConv, AFTConv2d, AFTFull, AFTLocal, AFTSimple
from postil.mixers.multi_head_attention import MultiHeadAttention


def run(module: nn.Module, x: Tensor, mask: Mask | Tensor | None = CAUSAL) -> Tensor:
    return module(query=x, key=x, value=x, mask=mask)


def test_local_keeps_its_constructor_and_starts_without_biases() -> None:
    module = AFTLocal(8, 20, 4, bias=False)
    assert module.query.bias is None and module.key.bias is None and module.value.bias is None
    assert module.output.bias is not None
    assert module.pos_bias.shape == (20, 7) and (module.pos_bias == 0).all()
    assert {name for name, _ in module.named_parameters()} == {
        "query.weight", "key.weight", "value.weight", "output.weight", "output.bias", "pos_bias",
    }  # fmt: skip
    assert not any(p.dtype == torch.bool for p in module.state_dict().values())


def test_local_mask() -> None:
    mask = AFTLocal.create_local_mask(10, 4)
    assert mask.dtype == torch.bool and mask.shape == (10, 10)
    expected = [[abs(t - s) < 4 for s in range(10)] for t in range(10)]
    assert mask.tolist() == expected


# A band of 65,536 rows is 16 MiB; a table of all pairs would be 16 GiB, and the mask 4.
def test_a_long_module_stores_only_the_band() -> None:
    module = AFTLocal(4, 65536, 32)
    assert sum(x.numel() for x in module.state_dict().values()) < 65536 * 63 + 100


def labml_state(module: AFTLocal, table: Tensor) -> dict[str, Tensor]:
    state = {key: x.clone() for key, x in module.state_dict().items() if key != "pos_bias"}
    window = module.local_window_size
    return {**state, "pos_bias": table, "local_mask": AFTLocal.create_local_mask(len(table), window)}


def test_a_full_table_with_its_mask_loads() -> None:
    module, table = AFTLocal(6, 15, 4).double(), torch.randn(15, 15).double()
    layers = nn.ModuleDict({"attn": AFTLocal(6, 15, 4).double()})
    state = {f"attn.{key}": x for key, x in labml_state(module, table).items()}
    layers.load_state_dict(state)
    full = AFTFull(6, 15).double()
    full.load_state_dict(
        {**labml_state(module, table), "pos_bias": table * AFTLocal.create_local_mask(15, 4)}, strict=False
    )
    x = torch.randn(15, 2, 6).double()
    for mask in (None, CAUSAL, torch.ones(15, 15).tril().bool()[:, :, None]):
        torch.testing.assert_close(run(layers["attn"], x, mask), run(full, x, mask), rtol=1e-10, atol=1e-10)


def test_a_table_that_does_not_fit_is_refused_by_both_lengths() -> None:
    module = AFTLocal(6, 15, 4)
    with pytest.raises(RuntimeError, match=r"seq_len=20 .*seq_len=15"):
        module.load_state_dict(labml_state(AFTLocal(6, 20, 4), torch.randn(20, 20)))
    with pytest.raises(RuntimeError, match=r"local_window_size=3.*local_window_size=4"):
        module.load_state_dict(labml_state(AFTLocal(6, 15, 3), torch.randn(15, 15)))


def test_copies_pickle_and_go_round() -> None:
    module = perturbed(AFTLocal(6, 15, 4))
    x = torch.randn(15, 2, 6)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), AFTLocal(6, 15, 4)):
        twin.load_state_dict(module.state_dict())
        assert torch.equal(run(twin, x), run(module, x))


# None, [T, S, B], [1, S, B], [T, S, 1], structured: every documented form of a mask means the same.
@pytest.mark.case("BC006")
def test_every_form_of_mask(member: Member) -> None:
    module = perturbed(member.module(6, 9)).double()
    x = torch.randn(9, 3, 6).double()
    keys = torch.rand(9, 3) > 0.4
    causal = torch.ones(9, 9).tril().bool()[:, :, None]
    torch.testing.assert_close(run(module, x, None), run(module, x, torch.ones(1, 9, 1, dtype=torch.bool)))
    torch.testing.assert_close(run(module, x, CAUSAL), run(module, x, causal))
    torch.testing.assert_close(run(module, x, CAUSAL), run(module, x, causal.long()))
    both = run(module, x, causal & keys[None])
    torch.testing.assert_close(run(module, x, Mask(causal=True, keys=keys))[keys], both[keys])
    with pytest.raises(TypeError, match=r"float32.*mask.bool\(\)"):
        run(module, x, causal.float())


def test_cross_use_and_single_queries(member: Member) -> None:
    module = perturbed(member.module(6, 12))
    memory, x = torch.randn(12, 2, 6), torch.randn(5, 2, 6)
    whole = module(query=x, key=memory, value=memory)
    assert whole.shape == x.shape
    first = module(query=x[:1], key=memory, value=memory)
    torch.testing.assert_close(first, whole[:1], rtol=1e-5, atol=1e-6)


# Drops into any layer: the call is that of multi-head attention.
def test_the_call_is_that_of_attention(member: Member) -> None:
    x = torch.randn(9, 2, 6)
    for module in (MultiHeadAttention(2, 6), member.module(6, 9)):
        assert module(query=x, key=x, value=x, mask=CAUSAL).shape == x.shape
        with pytest.raises(TypeError):
            module(x, x, x)


@pytest.mark.parametrize(
    "build", [lambda: AFTLocal(6, 8, 3), lambda: AFTFull(6, 8), lambda: AFTFull(6, 8, factors=2)]
)
def test_too_long_names_both_lengths(build) -> None:
    module = build()
    with pytest.raises(ValueError, match=r"position 9.*seq_len=8"):
        run(module, torch.randn(9, 1, 6))
    with pytest.raises(ValueError, match=r"position 9.*seq_len=8"):
        run(module, torch.randn(5, 1, 6), Mask(causal=True, offset=4))
    _, state = module.prefill(torch.randn(8, 1, 6))
    with pytest.raises(ValueError, match=r"position 9.*seq_len=8"):
        module.step(torch.randn(1, 6), state)


@pytest.mark.case("BC033")
def test_bad_sizes_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="d_model=30 must be divisible by heads=4"):
        AFTConv(4, 30, 3)
    with pytest.raises(ValueError, match="heads=0"):
        AFTConv2d(0, 30, 4, 3)
    with pytest.raises(ValueError, match="kernel_size=4 must be odd"):
        AFTConv2d(2, 30, 4, 4)
    with pytest.raises(ValueError, match="local_window_size=0"):
        AFTLocal(8, 10, 0)
    with pytest.raises(ValueError, match="d_model=0"):
        AFTSimple(0)


# `operands` is where shapes are checked; `forward` would be stopped here by the checks that only tests have.
def test_operands_of_different_shapes_are_refused(member: Member) -> None:
    module, x = member.module(6, 9), torch.randn(9, 2, 6)
    with pytest.raises(ValueError, match=r"same shape"):
        module.operands(query=x, key=x, value=x[:5])
    with pytest.raises(ValueError, match=r"agree in batch"):
        module.operands(query=x[:, :1], key=x, value=x)
    with pytest.raises(ValueError, match=r"axis 1 \(S\) must be 9"):
        module.operands(query=x, key=x, value=x, mask=torch.ones(9, 8, 1, dtype=torch.bool))


@pytest.mark.case("BC029")
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_padding_changes_nothing_backward_either(member: Member, junk: float) -> None:
    module = perturbed(member.module(6, 9))
    keys = torch.tensor([[1] * 9, [0, 0, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool).t()
    results = []
    for filler in (0.0, junk):
        x = torch.randn(9, 2, 6, generator=torch.Generator().manual_seed(1)).masked_fill(
            ~keys[..., None], filler
        )
        x.requires_grad_()
        module.zero_grad()
        y = run(module, x, Mask(causal=True, keys=keys))
        y[keys].square().sum().backward()
        assert x.grad is not None
        results.append([y[keys], x.grad, *(p.grad for p in module.parameters())])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


# Decoding takes the same time at any length because the state has the same size at any length.
@pytest.mark.parametrize(
    "build", [lambda: AFTSimple(6), lambda: AFTLocal(6, 1001, 8), lambda: AFTConv(2, 6, 5)]
)
@torch.no_grad()
def test_a_thousand_tokens_with_a_state_of_constant_size(build) -> None:
    module = perturbed(build())
    x = torch.randn(1000, 2, 6)
    expected = run(module, x)
    state, sizes = None, set()
    for t, x_t in enumerate(x):
        y, state = module.step(x_t, state)
        torch.testing.assert_close(y, expected[t], rtol=1e-5, atol=1e-5)
        tensors = [s for s in (*state, *getattr(state, "far", ())) if isinstance(s, Tensor)]
        sizes.add(sum(s.numel() for s in tensors))
    assert len(sizes) == 1
    if isinstance(module, AFTLocal):
        assert sizes == {(2 * 8 + 1) * 2 * 6}


# Under a step, the state handed in must stay what it was: a beam search goes on from it many times.
@torch.no_grad()
def test_states_are_values(member: Member) -> None:
    module = perturbed(member.module(6, 30))
    x = torch.randn(12, 2, 6)
    _, state = module.prefill(x[:7])
    kept = copy.deepcopy(state)
    module.step(x[7], state)
    module.prefill(x[7:], state)
    for before, after in zip(kept, state, strict=True):
        assert torch.equal(before, after) if isinstance(before, Tensor) else True
    first, second = module.step(x[7], state)[0], module.step(x[7], kept)[0]
    assert torch.equal(first, second)


def test_gradients_flow_through_a_state(member: Member) -> None:
    module = perturbed(member.module(6, 30)).double()
    x = torch.randn(12, 2, 6).double().requires_grad_()
    expected = torch.autograd.grad(run(module, x).sin().sum(), x)[0]
    head, state = module.prefill(x[:5])
    tail, _ = module.prefill(x[5:], state)
    found = torch.autograd.grad(torch.cat([head, tail]).sin().sum(), x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_a_kernel_without_effect_is_aft_simple() -> None:
    conv, simple = AFTConv(6, 6, 5), AFTSimple(6)
    simple.load_state_dict({key: x for key, x in conv.state_dict().items() if "." in key})
    x = torch.randn(20, 2, 6)
    torch.testing.assert_close(run(conv, x), run(simple, x), rtol=1e-5, atol=1e-6)


# A model exported once must serve; the walk is one operation in its graph.
def test_export() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = perturbed(AFTLocal(6, 20, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.mixer(query=x, key=x, value=x, mask=CAUSAL)

    model, x = Causal(), torch.randn(20, 2, 6)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))

"""Faults of earlier implementations; each test would fail there."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from models import D, F, H, L, build, build_layer, gradients, sequence
from torch import nn

from postil.masks import Mask
from postil.mixers.feedback import (
    FeedbackAttention,
    FeedbackTransformer,
    FeedbackTransformerKV,
    FeedbackTransformerLayer,
    feedback_transformer_reference,
    from_parallel,
)
from postil.mixers.feedback.memory import StackFunction
from postil.transformer.feed_forward import FeedForward, GatedFeedForward

BOTH = pytest.mark.parametrize("shared", [True, False])


def truth(model: FeedbackTransformerKV | FeedbackTransformer, x: torch.Tensor) -> list[torch.Tensor | None]:
    x = x.detach().requires_grad_()
    y = feedback_transformer_reference(*model.operands(x))[0]
    return gradients(y, [x, *model.parameters()])


def close(results: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@BOTH
@pytest.mark.case("BC024")
def test_forwards_interleave_with_backwards(shared: bool) -> None:
    model = build(shared)
    x, z = sequence().requires_grad_(), sequence(20, 2).requires_grad_()
    first, second = model(x), model(z)
    with torch.no_grad():
        model(sequence(5, 1))
    for _ in range(2):
        close(gradients(first, [x, *model.parameters()]), truth(model, x))
        close(gradients(second, [z, *model.parameters()]), truth(model, z))


@BOTH
def test_gradients_of_single_positions(shared: bool) -> None:
    model, x = build(shared), sequence(6, 2).requires_grad_()
    y, literal = model(x), feedback_transformer_reference(*model.operands(x))[0]
    for t in range(6):
        a = torch.autograd.grad(y[t].square().sum(), x, retain_graph=True)[0]
        b = torch.autograd.grad(literal[t].square().sum(), x, retain_graph=True)[0]
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.case("BC024")
def test_training_steps_in_a_row_equal_fresh_models() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        fresh = build()
        fresh.load_state_dict(model.state_dict())
        x = sequence()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        fresh(x).square().sum().backward()
        for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        optimizer.step()


@BOTH
def test_longer_than_any_buffer_or_table(shared: bool) -> None:
    model, x = build(shared, dtype=torch.float32, layers=1, positions=16), sequence(513, 1).float()
    x.requires_grad_()
    y = model(x)
    y.square().sum().backward()
    expected = feedback_transformer_reference(*model.operands(x))[0]
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert x.grad.isfinite().all()


@BOTH
def test_copies_moves_and_modes_after_a_forward(shared: bool) -> None:
    model, x = build(shared), sequence().requires_grad_()
    y = model(x)
    assert torch.equal(copy.deepcopy(model)(x), y)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert average(x).isfinite().all()
    assert model.float()(x.float()).dtype == torch.float32
    model.double()
    with torch.inference_mode():
        model(x)
    close(gradients(model(x), [x, *model.parameters()]), truth(model, x))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


@BOTH
def test_threads_train_one_model(shared: bool) -> None:
    model, inputs = build(shared), [sequence() for _ in range(4)]
    expected = [truth(model, x)[0] for x in inputs]
    results: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        x = inputs[i].clone().requires_grad_()
        results[i] = gradients(model(x), [x])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        torch.testing.assert_close(results[i], expected[i], rtol=1e-10, atol=1e-10)


@BOTH
def test_second_derivatives(shared: bool) -> None:
    model, x = build(shared), sequence(5, 2).requires_grad_()
    results = []
    for y in (model(x), feedback_transformer_reference(*model.operands(x))[0]):
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        inputs = [x, *model.parameters()]
        results.append(torch.autograd.grad(gradient.square().sum(), inputs, allow_unused=True))
    for a, b in zip(*results, strict=True):
        # A bias behind the last layer norm's input has no second derivative in one form, zeros in the other.
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b.expand_as(a), rtol=1e-9, atol=1e-9, check_dtype=False)


def test_function_transforms() -> None:
    model, x = build(), sequence(4, 3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    together = torch.func.grad(loss)(parameters, x)
    rows = x.transpose(0, 1)[:, :, None]
    alone = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, rows)
    for name, gradient in together.items():
        torch.testing.assert_close(alone[name].sum(dim=0), gradient, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.func.vmap(model)(rows)[:, :, 0], model(x).transpose(0, 1))


@BOTH
def test_a_dropped_output_frees_its_memory(shared: bool) -> None:
    model, x = build(shared), sequence().requires_grad_()
    y = model(x)
    nodes, graph = [y.grad_fn], []
    while nodes:
        node = nodes.pop()
        if node is not None:
            graph.append(weakref.ref(node)) if type(node).__name__ == "RecurrenceBackward" else None
            nodes += [parent for parent, _ in node.next_functions if "Accumulate" not in str(parent)]
    del nodes, node, y
    gc.collect()
    assert graph and all(reference() is None for reference in graph)


@pytest.mark.case("BC033")
@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: FeedbackAttention(4, 30), "d_model=30 .* heads=4"),
        (lambda: FeedbackAttention(0, 8), "heads=0"),
        (lambda: FeedbackAttention(2, 8, 1.5), "dropout_prob=1.5"),
        (lambda: FeedbackTransformerKV(build_layer(True), 2, 16, 2), "d_model=16.*d_model=8"),
        (lambda: FeedbackTransformerKV(build_layer(False), 2, D, H), "is_kv_precomputed=True"),
        (lambda: FeedbackTransformer(build_layer(True), 2), "is_kv_precomputed=False"),
        (lambda: FeedbackTransformer(build_layer(False), 0), "n_layers=0"),
        (lambda: build(window=0), "window=0"),
        (lambda: build(combine="sum"), "combine='sum'"),
        (lambda: build()(torch.zeros(3, 2, 9, dtype=torch.float64)), "width 9.*d_model=8"),
        (lambda: build().prefill(sequence(2, 3), build().prefill(sequence(2, 2))[1]), "batch of 2.*of 3"),
        (lambda: build()(sequence(4, 2), Mask(keys=torch.ones(5, 2) > 0)), "keys"),
    ],
)
def test_bad_input_is_named(call: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call()


def test_keys_and_values_must_fit() -> None:
    attention = FeedbackAttention(H, D, is_kv_precomputed=True)
    query, key = torch.zeros(2, D), torch.zeros(5, 2, H, D // H)
    with pytest.raises(ValueError, match="same shape"):
        attention(query=query, key=key, value=key[:4])
    with pytest.raises(ValueError, match="same shape"):
        attention(query=query[:1], key=key, value=key)
    with pytest.raises(ValueError, match="with heads"):
        attention(query=query, key=torch.zeros(5, 2, D), value=torch.zeros(5, 2, D))


def test_layers_start_apart_and_tables_at_zero() -> None:
    model = FeedbackTransformerKV(build_layer(True), 2, D, H)
    one, two = model.layers
    assert not torch.equal(one.attn.query.linear.weight, two.attn.query.linear.weight)
    assert one.attn.key_pos_embeddings.abs().max() == 0
    assert (model.weights == 1).all()


# ## Checkpoints of labml-nn 0.5.1

# fmt: off
NAMES = [
    "weights", "attn.key_pos_embeddings", "attn.key_pos_bias", "attn.query_pos_bias",
    "attn.query.linear.weight", "attn.output.weight", "attn.output.bias", "feed_forward.layer1.weight",
    "feed_forward.layer1.bias", "feed_forward.layer2.weight", "feed_forward.layer2.bias",
    "norm_self_attn.weight", "norm_self_attn.bias", "norm_ff.weight", "norm_ff.bias",
]
# fmt: on
ROOT = {True: ["key.linear.weight", "value.linear.weight"], False: []}
OWN = {True: [], False: ["attn.key.linear.weight", "attn.value.linear.weight", "attn.value.linear.bias"]}

# What labml-nn 0.5.1 gives at the last position for the weights and the input below, in float64.
EXPECTED = {
    True: [
        -0.1955586149, -0.2176916195, -0.416007399, -0.4933925279, 0.0671626062, 0.7308502454,
        0.704155901, 0.025652159, -0.4008921878, -0.3358003104, -0.4162400897, -0.5774613578,
        0.6744718812, 1.2239207263, 0.5795216447, 0.3941426463,
    ],
    False: [
        0.5019527482, 0.4069147949, 0.0176594667, -0.2754132157, -0.3795876551, 0.2636474911,
        0.7481829168, 1.0737748576, 0.361596355, 0.4885310801, -0.0106695209, -0.2864461231,
        -0.3597606978, 0.6025867077, 0.6962855567, 0.34340118,
    ],
}  # fmt: skip


@BOTH
def test_a_labml_checkpoint_gives_labml_results(shared: bool) -> None:
    attn = FeedbackAttention(H, D, 0.0, is_kv_precomputed=shared)
    layer = FeedbackTransformerLayer(
        d_model=D, attn=attn, feed_forward=FeedForward(D, F, 0.0), dropout_prob=0.0
    )
    model = FeedbackTransformerKV(layer, L, D, H) if shared else FeedbackTransformer(layer, L)
    names = ["weights", "norm.weight", "norm.bias", *ROOT[shared]]
    names += [f"layers.{i}.{name}" for i in range(L) for name in NAMES[1:] + OWN[shared]]
    assert set(model.state_dict()) == set(names)
    checkpoint = {}
    for i, (name, p) in enumerate(sorted(model.double().named_parameters())):
        wave = 0.5 * torch.sin(0.7 * torch.arange(p.numel(), dtype=torch.float64) + i)
        checkpoint[name] = (wave / (1 if p.dim() < 2 else p.shape[-1] ** 0.5)).reshape(p.shape)
    model.load_state_dict(checkpoint, strict=True)
    x = torch.sin(torch.arange(6 * 2 * D, dtype=torch.float64) * 0.37).reshape(6, 2, D)
    expected = torch.tensor(EXPECTED[shared], dtype=torch.float64).reshape(2, D)
    torch.testing.assert_close(model(x)[-1], expected, rtol=1e-8, atol=1e-8)


# ## Layers of other kinds


@BOTH
def test_other_feed_forwards_are_walked_through(shared: bool) -> None:
    model = build(shared, feed_forward=GatedFeedForward(D, F, 0.0), window=3)
    assert not model.layers[0].is_standard
    assert ["ReLU" in remark for remark in model.remarks()] == [True]
    assert not build(shared).remarks()
    x = sequence(9, 2).requires_grad_()
    keys = torch.tensor([[1, 0], [1, 1], [1, 0]] * 3, dtype=torch.bool)
    y = model(x, Mask(keys=keys))
    _, state = model.prefill(x[:4], mask=Mask(keys=keys[:4]))
    rest, _ = model.prefill(x[4:], state, mask=Mask(keys=keys[4:]))
    torch.testing.assert_close(rest, y[4:], rtol=1e-10, atol=1e-10)
    assert gradients(y, [x])[0].isfinite().all()


@BOTH
def test_walking_through_equals_the_fast_form(shared: bool) -> None:
    class Custom(FeedForward):
        pass

    custom = build(shared, feed_forward=Custom(D, F, 0.0))
    standard = build(shared)
    standard.load_state_dict(custom.state_dict())
    x = sequence(9, 2).requires_grad_()
    close(
        gradients(custom(x), [x, *custom.parameters()]),
        gradients(standard(x), [x, *standard.parameters()]),
    )


def test_stack_function_has_no_state_of_its_own() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    y = StackFunction.apply(rows[:2], rows[2], rows.detach().clone())
    assert torch.equal(torch.autograd.grad((y * y.detach()).sum(), rows)[0], rows.detach())


# ## Starting from a parallel transformer


@BOTH
def test_a_parallel_state_dict_becomes_a_feedback_one(shared: bool) -> None:
    parallel = {"norm.weight": torch.randn(D), "norm.bias": torch.randn(D)}
    model = build(shared, dtype=torch.float32)
    for name, p in model.state_dict().items():
        if name.startswith("layers.") and ".attn." not in name:
            parallel[name] = torch.randn_like(p)
    for i in range(L):
        for part in ("query", "key", "value"):
            parallel[f"layers.{i}.self_attn.{part}.linear.weight"] = torch.randn(D, D)
            parallel[f"layers.{i}.self_attn.{part}.linear.bias"] = torch.randn(D)
        parallel[f"layers.{i}.self_attn.output.weight"] = torch.randn(D, D)
        parallel[f"layers.{i}.self_attn.output.bias"] = torch.randn(D)
    translated = from_parallel(parallel, shared=shared)
    translated = {k: v.reshape(model.state_dict()[k].shape) for k, v in translated.items()}
    missing, unexpected = model.load_state_dict(translated, strict=False)
    assert not unexpected
    assert all(name == "weights" or "key_pos" in name for name in missing)
    if shared:
        keys = torch.stack([parallel[f"layers.{i}.self_attn.key.linear.weight"] for i in range(L)])
        torch.testing.assert_close(model.key.linear.weight.detach(), keys.mean(dim=0))


def test_not_a_parallel_state_dict() -> None:
    with pytest.raises(ValueError, match="not of a parallel transformer"):
        from_parallel(build().state_dict())


def test_dropout_is_on_in_training_alone() -> None:
    model, x = build(dropout=0.4), sequence()
    assert not torch.equal(model(x), model(x))
    torch.manual_seed(3)
    first = model(x)
    torch.manual_seed(3)
    assert torch.equal(model(x), first)
    model.eval()
    assert torch.equal(model(x), model(x))


def test_modules_are_modules() -> None:
    model = build()
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())

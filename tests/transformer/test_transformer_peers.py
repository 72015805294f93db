"""Outputs and gradients equal those of labml-nn 0.5.1 and of `torch.nn`, whose checkpoints load here."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from toy_mixers import TorchAttention

from postil.masks import Mask
from postil.mixers.multi_head_attention import MultiHeadAttention
from postil.transformer import (
    FEED_FORWARDS,
    CausalStack,
    Decoder,
    EmbeddingsWithLearnedPositionalEncoding,
    EmbeddingsWithPositionalEncoding,
    Encoder,
    EncoderDecoder,
    FeedForward,
    GatedFeedForward,
    Generator,
    TransformerLayer,
)

D, HEADS, FF, VOCAB = 8, 2, 12, 11
PEERS = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"


@pytest.fixture(scope="module")
def labml(tmp_path_factory):
    if not PEERS.exists():
        pytest.skip("no .venv-peers with labml-nn to compare with")
    out = tmp_path_factory.mktemp("labml") / "labml.npz"
    subprocess.run([PEERS, Path(__file__).with_name("labml_peer.py"), out], check=True, timeout=240)
    return {name: torch.from_numpy(value) for name, value in np.load(out).items()}


def case_of(arrays, case, part):
    prefix = f"{case}/{part}/"
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def check(arrays, case, module, call, atol=1e-12):
    """Load the peer's weights strictly, repeat its run, compare the output and every gradient."""
    module = module.double().eval()
    module.load_state_dict(case_of(arrays, case, "weights"))
    inputs = case_of(arrays, case, "inputs")
    leaves = {n: x.clone().requires_grad_() if x.is_floating_point() else x for n, x in inputs.items()}
    output = call(module, **leaves)
    output.backward(arrays[f"{case}/cotangent"])
    torch.testing.assert_close(output, arrays[f"{case}/output"], rtol=0, atol=atol)
    found = {n: v.grad for n, v in [*module.named_parameters(), *leaves.items()] if v.grad is not None}
    torch.testing.assert_close(found, case_of(arrays, case, "gradients"), rtol=0, atol=10 * atol)


def layer(src=False):
    return TransformerLayer(
        d_model=D,
        self_attn=MultiHeadAttention(HEADS, D),
        src_attn=MultiHeadAttention(HEADS, D) if src else None,
        feed_forward=FeedForward(D, FF),
        dropout_prob=0.1,
    )


@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_feed_forward_equals_labml_with_any_biases(labml, kind):
    form, activation = FEED_FORWARDS[kind]
    maps = ("layer1", "layer2", "linear_v") if form is GatedFeedForward else ("layer1", "layer2")
    cases = {name.split("/")[0] for name in labml if name.startswith(f"feed-forward {kind} ")}
    assert len(cases) == 2 ** len(maps)
    for case in cases:
        biases = [name for name, bit in zip(maps, case.split()[-1], strict=True) if bit == "1"]
        check(labml, case, form(D, FF, 0.1, activation, biases=biases), lambda m, x: m(x))


# labml computes its table in float32: an angle of some thousand radians is then off in the fourth decimal.
def test_fixed_positions_equal_labml_to_its_precision(labml):
    module = EmbeddingsWithPositionalEncoding(D, VOCAB, 20)
    check(labml, "fixed positions", module, lambda m, ids: m(ids), atol=1e-6)
    table = labml["fixed positions/weights/positional_encodings"]
    ours = EmbeddingsWithPositionalEncoding(D, VOCAB, 5000).positional_encodings
    torch.testing.assert_close(ours.double(), table, rtol=0, atol=1e-3)


def test_learned_positions_equal_labml(labml):
    module = EmbeddingsWithLearnedPositionalEncoding(D, VOCAB, 30)
    check(labml, "learned positions", module, lambda m, ids: m(ids))


def test_layers_and_stacks_equal_labml(labml):
    causal, padding = labml["causal"], labml["padding"]
    past, real = Mask(causal=True), Mask(keys=padding[0])
    # Its masks are taken as they are, and ours that mean the same give the same.
    for mask in (causal, past):
        check(labml, "layer", layer(), lambda m, x, mask=mask: m(x=x, mask=mask))
        check(labml, "causal stack", Encoder(layer(), 3), lambda m, x, mask=mask: m(x, mask))
    check(labml, "causal stack", CausalStack(layer(), 3), lambda m, x: m(x))
    check(labml, "encoder", Encoder(layer(), 3), lambda m, x: m(x, padding))
    for mask in (padding, real):
        check(
            labml,
            "decoder layer",
            layer(src=True),
            lambda m, x, src, mask=mask: m(x=x, mask=past, src=src, src_mask=mask),
        )
        check(
            labml,
            "decoder",
            Decoder(layer(src=True), 2),
            lambda m, x, memory, mask=mask: m(x, memory, mask, causal),
        )


# What a padded position itself computes is nobody's business, and a structured mask is free to zero it.
def test_structured_padding_equals_labml_on_the_real_positions(labml):
    padding = labml["padding"]
    encoder = Encoder(layer(), 3).double().eval()
    encoder.load_state_dict(case_of(labml, "encoder", "weights"))
    y = encoder(labml["encoder/inputs/x"], Mask(keys=padding[0]))
    torch.testing.assert_close(y[padding[0]], labml["encoder/output"][padding[0]], rtol=0, atol=1e-12)


# With labml's float32 table in the place of ours, all the rest has to agree in float64.
def test_an_encoder_decoder_equals_labml(labml):
    whole = EncoderDecoder(
        Encoder(layer(), 2),
        Decoder(layer(src=True), 2),
        EmbeddingsWithPositionalEncoding(D, VOCAB, 20),
        EmbeddingsWithLearnedPositionalEncoding(D, VOCAB, 30),
        Generator(VOCAB, D),
    ).double()
    whole.src_embed.positional_encodings = labml["encoder-decoder/weights/src_embed.positional_encodings"]
    call = lambda m, src, tgt: m.generator(m(src, tgt, labml["padding"]))  # noqa: E731
    check(labml, "encoder-decoder", whole, call)


def torch_layer(theirs, causal):
    """Our layer with the parameters of `torch.nn.TransformerEncoderLayer`, and the mask they share."""
    ours = TransformerLayer(
        d_model=D,
        self_attn=TorchAttention(D, HEADS),
        feed_forward=FeedForward(D, FF, 0.0, nn.functional.gelu),
        dropout_prob=0.0,
    ).double()
    names = {
        "self_attn.": "self_attn.attention.",
        "linear1.": "feed_forward.layer1.",
        "linear2.": "feed_forward.layer2.",
        "norm1.": "norm_self_attn.",
        "norm2.": "norm_ff.",
    }
    renamed = {}
    for name, value in theirs.state_dict().items():
        old = next(prefix for prefix in names if name.startswith(prefix))
        renamed[names[old] + name.removeprefix(old)] = value
    ours.load_state_dict(renamed)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else None
    return ours, Mask(causal=causal), hidden


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_equals_torch(causal):
    theirs = nn.TransformerEncoderLayer(D, HEADS, FF, 0.0, "gelu", norm_first=True).double()
    ours, mask, hidden = torch_layer(theirs, causal)
    x = torch.randn(6, 3, D, dtype=torch.float64)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = ours(x=first, mask=mask), theirs(second, src_mask=hidden)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    expected.backward(cotangent)
    torch.testing.assert_close(first.grad, second.grad, rtol=0, atol=1e-12)
    pairs = {
        "feed_forward.layer1.weight": "linear1.weight",
        "self_attn.attention.in_proj_weight": "self_attn.in_proj_weight",
        "norm_self_attn.weight": "norm1.weight",
        "norm_ff.bias": "norm2.bias",
    }
    for our_name, their_name in pairs.items():
        gradients = ours.get_parameter(our_name).grad, theirs.get_parameter(their_name).grad
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)

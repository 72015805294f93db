"""Run by a Python that has labml-nn: write its modules' weights, inputs, outputs and gradients to a file.

Usage: python labml_peer.py OUT.npz. Names inside are `case/weights/...`, `case/inputs/...`, `case/output`,
`case/cotangent` and `case/gradients/...`.
"""

import itertools
import sys

import numpy as np
import torch
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.mha import MultiHeadAttention
from labml_nn.transformers.models import (
    Decoder,
    EmbeddingsWithLearnedPositionalEncoding,
    EmbeddingsWithPositionalEncoding,
    Encoder,
    EncoderDecoder,
    Generator,
    TransformerLayer,
)
from torch import nn

D, HEADS, FF, VOCAB, S, T, B = 8, 2, 12, 11, 6, 5, 3
ACTIVATIONS = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "glu": nn.Sigmoid(),
    "bilinear": nn.Identity(),
    "reglu": nn.ReLU(),
    "geglu": nn.GELU(),
    "swiglu": nn.SiLU(),
}


def record(arrays, case, module, call, **inputs):
    """Run a module in float64 with parameters none of which is zero, and note everything about it."""
    module = module.double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    leaves = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in inputs.items()}
    output = call(module, **leaves)
    cotangent = torch.randn_like(output)
    output.backward(cotangent)
    arrays[f"{case}/output"], arrays[f"{case}/cotangent"] = output, cotangent
    for name, value in module.state_dict().items():
        arrays[f"{case}/weights/{name}"] = value
    for name, value in leaves.items():
        arrays[f"{case}/inputs/{name}"] = value
    for name, value in [*module.named_parameters(), *leaves.items()]:
        if value.grad is not None:
            arrays[f"{case}/gradients/{name}"] = value.grad


def vectors(length):
    return torch.randn(length, B, D, dtype=torch.float64)


def tokens(length):
    return torch.randint(VOCAB, (length, B))


def layer(src=False):
    return TransformerLayer(
        d_model=D,
        self_attn=MultiHeadAttention(HEADS, D),
        src_attn=MultiHeadAttention(HEADS, D) if src else None,
        feed_forward=FeedForward(D, FF),
        dropout_prob=0.1,
    )


def feed_forwards(arrays):
    for kind, activation in ACTIVATIONS.items():
        gated = kind not in ("relu", "gelu")
        for biases in itertools.product([True, False], repeat=3 if gated else 2):
            module = FeedForward(D, FF, 0.1, activation, gated, *biases)
            case = f"feed-forward {kind} {''.join('01'[bias] for bias in biases)}"
            record(arrays, case, module, lambda m, x: m(x), x=vectors(T))


def layers_and_stacks(arrays):
    # labml's masks: the past only; the first four keys of the first row and all of the others.
    causal = torch.tril(torch.ones(T, T, dtype=torch.bool))[:, :, None]
    padding = (torch.arange(S)[:, None] < torch.tensor([4, S, S])[None, :])[None]
    arrays["causal"], arrays["padding"] = causal, padding
    record(arrays, "layer", layer(), lambda m, x: m(x=x, mask=causal), x=vectors(T))
    record(
        arrays,
        "decoder layer",
        layer(src=True),
        lambda m, x, src: m(x=x, mask=causal, src=src, src_mask=padding),
        x=vectors(T),
        src=vectors(S),
    )
    record(arrays, "encoder", Encoder(layer(), 3), lambda m, x: m(x, padding), x=vectors(S))
    record(arrays, "causal stack", Encoder(layer(), 3), lambda m, x: m(x, causal), x=vectors(T))
    record(
        arrays,
        "decoder",
        Decoder(layer(src=True), 2),
        lambda m, x, memory: m(x, memory, padding, causal),
        x=vectors(T),
        memory=vectors(S),
    )
    whole = EncoderDecoder(
        Encoder(layer(), 2),
        Decoder(layer(src=True), 2),
        EmbeddingsWithPositionalEncoding(D, VOCAB, 20),
        EmbeddingsWithLearnedPositionalEncoding(D, VOCAB, 30),
        Generator(VOCAB, D),
    )
    record(
        arrays,
        "encoder-decoder",
        whole,
        lambda m, src, tgt: m.generator(m(src, tgt, padding, causal)),
        src=tokens(S),
        tgt=tokens(T),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    found = {}
    feed_forwards(found)
    layers_and_stacks(found)
    fixed, learned = EmbeddingsWithPositionalEncoding, EmbeddingsWithLearnedPositionalEncoding
    record(found, "fixed positions", fixed(D, VOCAB, 5000), lambda m, ids: m(ids), ids=tokens(T))
    record(found, "learned positions", learned(D, VOCAB, 30), lambda m, ids: m(ids), ids=tokens(T))
    np.savez(sys.argv[1], **{name: value.detach().numpy() for name, value in found.items()})

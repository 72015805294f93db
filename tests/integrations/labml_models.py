"""Run by a Python that has labml-nn: write checkpoints of its language models, and logits of each.

Usage: python labml_models.py FOLDER VOCABULARY.
"""

import sys

import torch
from labml_nn.transformers.aft import AFTLocal
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.mha import MultiHeadAttention
from labml_nn.transformers.models import (
    EmbeddingsWithLearnedPositionalEncoding,
    EmbeddingsWithPositionalEncoding,
    Encoder,
    Generator,
    TransformerLayer,
)
from torch import nn

D, T = 8, 20
FOLDER, VOCAB = sys.argv[1], int(sys.argv[2])


# The experiments' class, whose module cannot be imported without the experiments' own requirements.
class AutoregressiveTransformer(nn.Module):
    def __init__(self, encoder, src_embed, generator):
        super().__init__()
        self.src_embed, self.encoder, self.generator = src_embed, encoder, generator

    def forward(self, ids):
        mask = torch.tril(torch.ones(len(ids), len(ids), dtype=torch.bool))[:, :, None]
        return self.generator(self.encoder(self.src_embed(ids), mask))


torch.manual_seed(1)
for name in ("basic", "learned", "gated", "aft"):
    attention = MultiHeadAttention(2, D, 0.1, bias=name != "gated")
    mixer = AFTLocal(D, T, 4) if name == "aft" else attention
    gate = (0.1, nn.SiLU(), True, False, False, False) if name == "gated" else ()
    ff = FeedForward(D, 12, *gate)
    layer = TransformerLayer(d_model=D, self_attn=mixer, src_attn=None, feed_forward=ff, dropout_prob=0.1)
    table = EmbeddingsWithLearnedPositionalEncoding if name == "learned" else EmbeddingsWithPositionalEncoding
    model = AutoregressiveTransformer(Encoder(layer, 2), table(D, VOCAB, T), Generator(VOCAB, D)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    ids = torch.randint(0, VOCAB, (T, 3))
    torch.save(model.state_dict(), f"{FOLDER}/{name}.pth")
    torch.save({"ids": ids, "logits": model(ids).detach()}, f"{FOLDER}/{name}-logits.pt")

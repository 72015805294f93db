"""Small mixers, so that these tests hold what stands around a mixer and nothing about any real one."""

import torch
from torch import nn

from postil.masks import as_mask, dense_mask
from postil.mixer import CausalMixer, Mixer


class MeanMixer(CausalMixer):
    """Each position gets a linear map of the mean of what it may read. State: (sum, count)."""

    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, *, query, key, value, mask=None):
        allowed = dense_mask(as_mask(mask), query.shape[0], key.shape[0]).to(value.dtype)
        allowed = allowed.expand(-1, -1, value.shape[1])
        means = torch.einsum("tsb,sbd->tbd", allowed, value) / allowed.sum(1).clamp(min=1)[:, :, None]
        return self.linear(means + query)

    def prefill(self, x, state=None):
        total, count = (torch.zeros_like(x[0]), 0) if state is None else state
        sums = total + x.cumsum(0)
        counts = torch.arange(count + 1, count + 1 + x.shape[0], dtype=x.dtype)[:, None, None]
        return self.linear(sums / counts + x), (sums[-1], count + x.shape[0])

    def reset_parameters(self):
        self.linear.reset_parameters()


class TorchAttention(Mixer):
    """`torch.nn.MultiheadAttention` behind the protocol."""

    def __init__(self, d_model, heads):
        super().__init__()
        self.d_model = d_model
        self.attention = nn.MultiheadAttention(d_model, heads)

    def forward(self, *, query, key, value, mask=None):
        hidden = ~dense_mask(as_mask(mask), query.shape[0], key.shape[0])[:, :, 0]
        return self.attention(query, key, value, attn_mask=hidden, need_weights=False)[0]

    def reset_parameters(self):
        self.attention._reset_parameters()

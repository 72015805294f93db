r"""The Attention Free Transformer, trained beside attention and beside labml-nn's.

`python benchmarks/aft_training.py` trains three small language models on Tiny Shakespeare, two or three
minutes each on one core: AFT-local, multi-head attention, and labml-nn's AFT-local where it is installed (see
`aft.py`). The text is read from `POSTIL_DATA` or from a file that is named. The layers around the mixers are
the same, and so are the first weights, the batches and their order. Position biases are parameters too, so
the feed-forward networks beside attention, which has none, are a little wider.

One run of each says which model learns and roughly how fast; it does not settle differences of a hundredth.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from measure import installed, write_results
from postil.language_model import LanguageModel, next_token_loss
from postil.masks import MaskLike, as_mask, dense_mask
from postil.mixers.aft import AFTLocal
from postil.mixers.multi_head_attention import MultiHeadAttention
from postil.transformer.encoder_decoder import CausalStack, Generator
from postil.transformer.feed_forward import feed_forward
from postil.transformer.layers import TransformerLayer
from postil.transformer.positions import EmbeddingsWithLearnedPositionalEncoding

D, LAYERS, HEADS, WINDOW = 128, 4, 4, 32
T, BATCH, RATE, WARMUP = 128, 16, 2e-3, 100
FEED_FORWARD = {"AFTLocal": 512, "multi-head attention": 544, "labml-nn AFTLocal": 512}


def theirs() -> nn.Module:
    """labml-nn's AFT-local, called as our mixers are."""
    from labml_nn.transformers.aft import AFTLocal as Local

    class Theirs(Local):
        d_model = D

        def reset_parameters(self) -> None:
            for linear in (self.query, self.key, self.value, self.output):
                linear.reset_parameters()

        def forward(self, *, query: Tensor, key: Tensor, value: Tensor, mask: MaskLike = None) -> Tensor:
            allowed = dense_mask(as_mask(mask), query.shape[0], key.shape[0])
            return super().forward(query=query, key=key, value=value, mask=allowed)

    return Theirs(D, T, WINDOW)


def build(name: str, symbols: int) -> LanguageModel:
    """Build a language model over one of the mixers, with the same first weights wherever they correspond."""
    torch.manual_seed(0)
    mixer = {
        "AFTLocal": lambda: AFTLocal(D, T, WINDOW),
        "multi-head attention": lambda: MultiHeadAttention(HEADS, D, 0.0),
        "labml-nn AFTLocal": theirs,
    }[name]()
    layer = TransformerLayer(
        d_model=D,
        self_attn=mixer,
        feed_forward=feed_forward("gelu", D, FEED_FORWARD[name], 0.0),
        dropout_prob=0.0,
    )
    embedding = EmbeddingsWithLearnedPositionalEncoding(D, symbols, T)
    return LanguageModel(embedding, CausalStack(layer, LAYERS), Generator(symbols, D), max_len=T)


def schedule(update: int, updates: int) -> float:
    return min(1.0, (update + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * update / updates))


# Symbols are numbered in the order of their code points; the last tenth of the text is for validation.
def read(path: Path) -> tuple[Tensor, Tensor, int]:
    text = path.read_text(encoding="utf-8")
    symbols = {symbol: i for i, symbol in enumerate(sorted(set(text)))}
    ids = torch.tensor([symbols[symbol] for symbol in text])
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], len(symbols)


def windows(ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    rows = ids[starts[:, None] + torch.arange(T + 1)]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def bits(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Validation loss in bits per character."""
    total = sum(float(next_token_loss(model(x), y)) for x, y in batches)
    return total / sum(y.numel() for _, y in batches) / math.log(2)


def train(name: str, updates: int, symbols: int, training: Tensor, validation: Tensor) -> dict[str, Any]:
    model, generator = build(name, symbols), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: schedule(update, updates))
    everything = [windows(validation, s) for s in torch.arange(0, len(validation) - T, T).split(64)]
    curve, start = [], time.thread_time()
    for update in range(updates):
        x, y = windows(training, torch.randint(len(training) - T, (BATCH,), generator=generator))
        loss = next_token_loss(model(x), y) / y.numel()
        if not loss.isfinite():
            print(f"{name}: the loss is {float(loss)} at update {update}")
            break
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        # A part of the validation text is enough for the curve; the last figure is of all of it.
        if (update + 1) % 100 == 0 and update + 1 < updates:
            curve.append([update + 1, round(bits(model, everything[:4]), 4)])
            print(name, *curve[-1], flush=True)
    finished = update + 1 == updates
    return {
        "what": "training on Tiny Shakespeare",
        "name": name,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "T": T,
        "B": BATCH,
        "D": D,
        "updates": updates,
        "tokens": updates * T * BATCH,
        "not_finite_at_update": None if finished else update,
        "validation_bits_per_character": round(bits(model, everything), 4) if finished else None,
        "curve": curve,
        "thread_seconds": round(time.thread_time() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=500)
    folder = Path(os.environ.get("POSTIL_DATA", "."))
    parser.add_argument("--text", type=Path, default=folder / "tiny-shakespeare/input.txt")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    training, validation, symbols = read(chosen.text)
    peer = installed("labml_nn")
    names, rows = [name for name in FEED_FORWARD if peer or not name.startswith("labml")], []
    for name in names:
        rows.append(train(name, chosen.updates, symbols, training, validation))
        print(rows[-1])
        write_results("aft-training", rows, ("labml-nn", "labml"))


if __name__ == "__main__":
    main()

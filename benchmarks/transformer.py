r"""The plain transformer: training against PyTorch's own, decoding against recomputing.

`python benchmarks/transformer.py` measures, at the sizes of the paper experiment (D=256, H=16, L=6,
d_ff=1024, T=512, B=16), one training pass (loss forward and backward) of our language model and of the same
sizes in `torch.nn.TransformerEncoder`, which runs the same attention kernel. Then it writes 1,000 characters
with the state and by recomputing every prefix. `--quick` takes small sizes, to see that it runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from measure import compare, steady_malloc, write_results
from postil.language_model import LanguageModel, NextTokenLoss, next_token_loss
from postil.registry import ModelSettings, build_language_model

VOCABULARY = 65


class TorchLanguageModel(nn.Module):
    """The same sizes from PyTorch's parts."""

    def __init__(self, s: ModelSettings):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, s.d_model)
        self.positions = nn.Parameter(torch.zeros(s.seq_len, 1, s.d_model))
        layer = nn.TransformerEncoderLayer(
            s.d_model, s.heads, s.feed_forward_width, s.dropout, activation="relu", norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, s.n_layers, norm=nn.LayerNorm(s.d_model), enable_nested_tensor=False
        )
        self.generator = nn.Linear(s.d_model, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(s.seq_len)
        self.register_buffer("mask", mask, persistent=False)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids.T) * self.embedding.embedding_dim**0.5 + self.positions
        y = self.encoder(x, mask=self.mask, is_causal=True)
        return next_token_loss(self.generator(y), targets.T)


def training(s: ModelSettings, batch: int, rounds: int, threads: int) -> dict:
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (batch, s.seq_len))
    ours = NextTokenLoss(build_language_model("multi-head-attention", s, VOCABULARY))
    theirs = TorchLanguageModel(s)

    def run(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            loss().backward()

        return step

    result = compare(
        {
            "postil": run(ours, lambda: ours(ids, ids)[0]),
            "torch.nn.TransformerEncoder": run(theirs, lambda: theirs.loss(ids, ids)),
        },
        rounds=rounds,
        threads=threads,
    )
    return {
        "what": "training pass, postil / torch.nn.TransformerEncoder",
        "sizes": sizes(s) | {"B": batch, "dropout": s.dropout},
        "threads": threads,
        "rounds": rounds,
        "ratio": result["postil"]["ratio"]["torch.nn.TransformerEncoder"],
        "seconds": {name: row["median"] for name, row in result.items()},
    }


@torch.no_grad()
def decoding(s: ModelSettings, characters: int, threads: int) -> dict:
    """Write `characters` tokens both ways, interleaved in chunks of a tenth, and compare whole times."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = build_language_model("multi-head-attention", s, VOCABULARY).eval()
    clock = time.thread_time if threads == 1 else time.perf_counter
    with_state, recomputed = 0.0, 0.0
    ids = torch.zeros(1, 1, dtype=torch.long)
    state = None
    logits, state = model.prefill(ids, state)
    cached = [int(logits[0, -1].argmax())]
    text = [0, cached[0]]
    chunk = max(1, characters // 10)
    while len(text) <= characters:
        start = clock()
        for _ in range(chunk):
            logits, state = model.step(torch.tensor([cached[-1]]), state)
            cached.append(int(logits[0].argmax()))
        with_state += clock() - start
        recomputed += recompute(model, text, chunk, threads)
    agree = sum(a == b for a, b in zip(cached, text[1:], strict=False))
    return {
        "what": f"writing {characters} characters, recomputing every prefix / with state",
        "sizes": sizes(s) | {"B": 1},
        "threads": threads,
        "ratio": {"median": float(f"{recomputed / with_state:.4g}")},
        "seconds": {"with state": round(with_state, 2), "recomputing": round(recomputed, 2)},
        "equal characters": agree / len(cached),
    }


def recompute(model: LanguageModel, text: list[int], count: int, threads: int) -> float:
    clock = time.thread_time if threads == 1 else time.perf_counter
    start = clock()
    for _ in range(count):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return clock() - start


def sizes(s: ModelSettings) -> dict:
    return {"D": s.d_model, "H": s.heads, "L": s.n_layers, "d_ff": s.feed_forward_width, "T": s.seq_len}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="2 needs a quiet machine")
    arguments = parser.parse_args()
    full = {"d_model": 256, "n_layers": 6, "heads": 16, "d_ff": 1024}
    small = {"d_model": 64, "n_layers": 2, "heads": 4, "d_ff": 256}
    shape = small if arguments.quick else full
    length, batch, characters = (64, 4, 100) if arguments.quick else (512, 16, 1000)
    plain = ModelSettings(**shape, seq_len=length, dropout=0.0)
    measurements = [
        lambda threads=threads: training(plain, batch, arguments.rounds, threads)
        for threads in arguments.threads
    ]
    measurements.append(lambda: decoding(replace(plain, seq_len=characters + 2), characters, 1))
    # PyTorch's fused kernel has no dropout on a CPU: with it, both sides hold the weights and take three
    # times as long. So it comes last.
    measurements.append(lambda: training(replace(plain, dropout=0.1), batch, arguments.rounds, 1))
    rows = []
    for measure in measurements:
        rows.append(measure())
        print(rows[-1], flush=True)
        write_results("transformer-quick" if arguments.quick else "transformer", rows)


if __name__ == "__main__":
    steady_malloc()
    main()

r"""The Feedback Transformer, measured.

`python benchmarks/feedback.py --quick` takes some minutes, `--full` all sizes of the table. Peers are
compared where they are installed (`benchmarks/peers.txt`, in an environment of their own, with
`PYTHONPATH=src`).

The yardstick is a parallel pre-norm transformer of the same sizes, in eager PyTorch with its fused attention:
what one would train if the recurrence were too slow. All models get the same input and no dropout.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measure import compare, peak_memory, print_peak, steady_malloc, write_results
from postil.mixers.feedback import (
    FeedbackAttention,
    FeedbackTransformer,
    FeedbackTransformerKV,
    FeedbackTransformerLayer,
    kernel,
    kernel_status,
)
from postil.transformer.feed_forward import FeedForward

H = 8
SIZES = [(128, 4, 128, 32), (256, 6, 128, 32), (512, 6, 128, 16), (256, 6, 512, 8)]
PARALLEL, SHARED, ORIGINAL = "parallel transformer", "shared", "original"
PLAIN = "shared, plain form"


class Parallel(nn.Module):
    """One layer of the yardstick, batch first; `cache` holds keys and values when decoding."""

    def __init__(self, d: int):
        super().__init__()
        self.qkv, self.output = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.layer1, self.layer2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None, now: int = 0) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            for buffer, new in zip(cache, (k, v), strict=True):
                buffer[:, :, now : now + 1] = new
            k, v = (buffer[:, :, : now + 1] for buffer in cache)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.layer2(F.relu(self.layer1(self.norm2(x))))


def build(name: str, d: int, layers: int) -> nn.Module:
    """Build a model by name."""
    if name == PARALLEL:
        return nn.Sequential(*(Parallel(d) for _ in range(layers)), nn.LayerNorm(d))
    if name.startswith("labml-nn"):
        from labml_nn.transformers import feedback as theirs
        from labml_nn.transformers.feed_forward import FeedForward as TheirFeedForward

        shared = "KV" in name
        attn = theirs.FeedbackAttention(H, d, 0.0, is_kv_precomputed=shared)
        layer = theirs.FeedbackTransformerLayer(
            d_model=d, attn=attn, feed_forward=TheirFeedForward(d, 4 * d, 0.0), dropout_prob=0.0
        )
        if shared:
            return theirs.FeedbackTransformerKV(layer, layers, d, H)
        return theirs.FeedbackTransformer(layer, layers)
    if name == "lucidrains":
        from feedback_transformer_pytorch import FeedbackTransformer as Theirs

        return Theirs(num_tokens=64, dim=d, depth=layers, seq_len=1, mem_len=10**6, heads=H, dim_head=d // H)
    shared = name != ORIGINAL
    attn = FeedbackAttention(H, d, 0.0, is_kv_precomputed=shared)
    layer = FeedbackTransformerLayer(
        d_model=d, attn=attn, feed_forward=FeedForward(d, 4 * d, 0.0), dropout_prob=0.0
    )
    return FeedbackTransformerKV(layer, layers, d, H) if shared else FeedbackTransformer(layer, layers)


def operand(name: str, d: int, t: int, b: int) -> Tensor:
    """Make the input as the model wants it."""
    if name == "lucidrains":
        return torch.randint(64, (b, t))
    return torch.randn(b, t, d) if name == PARALLEL else torch.randn(t, b, d)


# The kernel is taken wherever it fits. To measure the plain form beside it, it is told that it does not.
def call(name: str, model: nn.Module, x: Tensor) -> Tensor:
    """Compute a sequence."""
    if name != PLAIN:
        return model(x)
    fits, kernel.fits = kernel.fits, lambda p: False
    try:
        return model(x)
    finally:
        kernel.fits = fits


def forward(name: str, d: int, layers: int, t: int, b: int) -> Callable[[], Any]:
    model, x = build(name, d, layers), operand(name, d, t, b)

    def run() -> None:
        with torch.no_grad():
            call(name, model, x)

    return run


def backward(name: str, d: int, layers: int, t: int, b: int) -> Callable[[], Any]:
    model, x = build(name, d, layers), operand(name, d, t, b)

    def run() -> None:
        model.zero_grad()
        y = call(name, model, x)
        fits = kernel.fits
        if name == PLAIN:
            kernel.fits = lambda p: False
        try:
            y.square().mean().backward()
        finally:
            kernel.fits = fits

    return run


def names(d: int, t: int, b: int, *, peers: bool) -> list[str]:
    chosen = [PARALLEL, SHARED, PLAIN]
    if (d, t) == (256, 128):
        chosen.append(ORIGINAL)
    if peers and _installed("labml_nn"):
        chosen += ["labml-nn KV", *(["labml-nn original"] if ORIGINAL in chosen else [])]
    if peers and _installed("feedback_transformer_pytorch"):
        chosen.append("lucidrains")
    return chosen


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def speed(
    sizes: list[tuple[int, int, int, int]], rounds: int, threads: int, *, peers: bool
) -> list[dict[str, Any]]:
    rows = []
    for d, layers, t, b in sizes:
        for kind, make in (("forward", forward), ("forward+backward", backward)):
            runs = {name: make(name, d, layers, t, b) for name in names(d, t, b, peers=peers)}
            times = compare(runs, rounds=rounds, threads=threads)
            against = {n: v["ratio"].get(PARALLEL, {}).get("median", 1.0) for n, v in times.items()}
            rows.append(
                {"what": kind, "D": d, "L": layers, "T": t, "B": b, "H": H, "rounds": rounds}
                | {"threads": threads, "over_parallel_transformer": against, "times": times}
            )
            print(f"{kind:17} D={d} L={layers} T={t} B={b} threads={threads}: {against}", flush=True)
    return rows


# One token at a time, after a text of T tokens. Both models are eager PyTorch here.
def decoding(sizes: list[tuple[int, int, int]], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for d, layers, t in sizes:
        shared, parallel = build(SHARED, d, layers), build(PARALLEL, d, layers)
        windowed = build(SHARED, d, layers)
        windowed.window = t // 4
        caches = [(torch.randn(1, H, t + 1, d // H), torch.randn(1, H, t + 1, d // H)) for _ in range(layers)]
        x = torch.randn(1, d)
        with torch.no_grad():
            states = {m: m.step(x, m.prefill(torch.randn(t, 1, d))[1])[1] for m in (shared, windowed)}

            def decode(caches: Any = caches, parallel: Any = parallel, x: Tensor = x, t: int = t) -> None:
                h = x[None]
                for layer, cache in zip(parallel[:-1], caches, strict=True):
                    h = layer(h, cache, t)
                parallel[-1](h)

            # Time goes on from step to step, as in use: a state continued twice would copy itself.
            def step(model: nn.Module, x: Tensor = x, states: Any = states) -> None:
                states[model] = model.step(x, states[model])[1]

            times = compare(
                {
                    "parallel transformer, cached": decode,
                    "shared": lambda m=shared: step(m),
                    "shared, window of a quarter": lambda m=windowed: step(m),
                },
                rounds=rounds,
            )
        rows.append({"what": "decoding one token", "D": d, "L": layers, "after": t, "B": 1, "times": times})
        faster = times["parallel transformer, cached"]["ratio"]["shared"]["median"]
        per_second = {n: round(1 / v["median"]) for n, v in times.items()}
        print(f"decoding D={d} after {t}: {faster:.2f} times the parallel one; {per_second} tokens/s")
    return rows


def memory(sizes: list[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    rows = []
    for d, layers, t, b in sizes:
        for name in (PARALLEL, SHARED, PLAIN, "labml-nn KV"):
            if name.startswith("labml") and not _installed("labml_nn"):
                continue
            sizes_given = [str(n) for n in (d, layers, t, b)]
            peak = peak_memory([sys.executable, __file__, "--peak", name, *sizes_given])
            rows.append({"what": "peak memory, forward+backward", "name": name, "D": d, "L": layers})
            rows[-1] |= {"T": t, "B": b, "bytes": peak, "units_of_TBD": round(peak / (4 * t * b * d), 1)}
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, few rounds (the default)")
    parser.add_argument("--full", action="store_true", help="all sizes, 9 rounds, two threads as well")
    parser.add_argument("--peak", nargs=5, metavar=("NAME", "D", "L", "T", "B"), help="one run's peak memory")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if chosen.peak:
        name, (d, layers, t, b) = chosen.peak[0], (int(n) for n in chosen.peak[1:])
        run = backward(name, d, layers, t, b)
        backward(name, 64, 1, 8, 1)()
        print_peak(run)
        return
    steady_malloc()
    print(kernel_status())
    sizes, rounds = (SIZES, 9) if chosen.full else (SIZES[:2], 7)
    rows = speed(sizes, rounds, threads=1, peers=True)
    rows += speed(sizes, rounds, threads=2, peers=False) if chosen.full else []
    rows += decoding([(512, 6, 128), (256, 6, 256)], rounds)
    rows += memory([SIZES[0], SIZES[1], SIZES[3]] if chosen.full else SIZES[:1])
    versions = [
        name
        for name, package in (
            ("labml-nn", "labml_nn"),
            ("feedback-transformer-pytorch", "feedback_transformer_pytorch"),
        )
        if _installed(package)
    ]
    print(write_results("feedback" if chosen.full else "feedback-quick", rows, tuple(versions)))


if __name__ == "__main__":
    main()

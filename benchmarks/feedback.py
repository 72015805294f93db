r"""The Feedback Transformer, measured.

`python benchmarks/feedback.py --quick` takes some minutes, `--full`, all sizes of the table, a quarter of an
hour. Results are written after each row. Peers are compared where they are installed (`benchmarks/peers.txt`,
in an environment of their own, with `PYTHONPATH=src`).

The yardstick is a parallel pre-norm transformer of the same sizes, in eager PyTorch with its fused attention:
what one would train if the recurrence were too slow. All models get the same input and no dropout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measure import compare, installed, peak_memory, print_peak, steady_malloc, write_results
from postil.mixers.feedback import (
    FeedbackAttention,
    FeedbackState,
    FeedbackTransformer,
    FeedbackTransformerKV,
    FeedbackTransformerLayer,
    kernel,
)
from postil.transformer.feed_forward import FeedForward

H = 8
PACKAGES = ("labml-nn", "feedback-transformer-pytorch")
SIZES = [(128, 4, 128, 32), (256, 6, 128, 32), (512, 6, 128, 16), (256, 6, 512, 8)]
PARALLEL, SHARED, ORIGINAL = "parallel transformer", "shared", "original"
PLAIN, RECOMPUTED = "shared, plain form", "shared, probabilities recomputed"
WRITTEN = "parallel transformer, probabilities kept"
Row = dict[str, Any]
Sizes = tuple[int, int, int, int]


class Parallel(nn.Module):
    """One layer of the yardstick, batch first; `cache` holds keys and values when decoding.

    With `kept` attention is written out, so that all probabilities are kept for backward.
    """

    def __init__(self, d: int, kept: bool = False):
        super().__init__()
        self.kept = kept
        self.qkv, self.output = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.layer1, self.layer2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None, now: int = 0) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            for buffer, new in zip(cache, (k, v), strict=True):
                buffer[:, :, now : now + 1] = new
            k, v = (buffer[:, :, : now + 1] for buffer in cache)
        if self.kept:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
            y = scores.masked_fill_(future, -torch.inf).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.layer2(F.relu(self.layer1(self.norm2(x))))


def build(name: str, d: int, layers: int) -> nn.Module:
    """Build a model by name."""
    if name in (PARALLEL, WRITTEN):
        return nn.Sequential(*(Parallel(d, name == WRITTEN) for _ in range(layers)), nn.LayerNorm(d))
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
    if not shared:
        return FeedbackTransformer(layer, layers)
    return FeedbackTransformerKV(layer, layers, d, H, recompute=name == RECOMPUTED)


def operand(name: str, d: int, t: int, b: int) -> Tensor:
    """Make the input as the model wants it."""
    if name == "lucidrains":
        return torch.randint(64, (b, t))
    return torch.randn(b, t, d) if name in (PARALLEL, WRITTEN) else torch.randn(t, b, d)


# The kernel is taken wherever it fits. To measure the plain form beside it, it is told that it does not.
def form(name: str) -> AbstractContextManager[Any]:
    """Compute by the form that is asked for."""
    if name != PLAIN:
        return nullcontext()
    return patch.multiple(kernel, fits=lambda p: False, steps=lambda *operands: False)


def forward(name: str, d: int, layers: int, t: int, b: int) -> Callable[[], Any]:
    model, x = build(name, d, layers), operand(name, d, t, b)

    def run() -> None:
        with torch.no_grad(), form(name):
            model(x)

    return run


def backward(name: str, d: int, layers: int, t: int, b: int) -> Callable[[], Any]:
    model, x = build(name, d, layers), operand(name, d, t, b)

    def run() -> None:
        model.zero_grad()
        with form(name):
            model(x).square().mean().backward()

    return run


def compared(what: str, names: list[str], sizes: Sizes, rounds: int, threads: int = 1) -> Row:
    """Train with, or compute forward, every model of a list, side by side."""
    make = forward if what == "forward" else backward
    times = compare({name: make(name, *sizes) for name in names}, rounds=rounds, threads=threads)
    against = {n: v["ratio"].get(PARALLEL, {}).get("median", 1.0) for n, v in times.items()}
    d, layers, t, b = sizes
    print(f"{what:24} D={d} L={layers} T={t} B={b} threads={threads}: {against}", flush=True)
    row = {"what": what, "D": d, "L": layers, "T": t, "B": b, "H": H, "rounds": rounds, "threads": threads}
    return row | {"over_parallel_transformer": against, "times": times}


def speed(sizes: list[Sizes], rounds: int, threads: int = 1) -> Iterator[Row]:
    for each in sizes:
        names = [PARALLEL, SHARED]
        if threads == 1:
            names += [PLAIN, *([ORIGINAL] if each[0::2] == (256, 128) else [])]
        yield compared("forward+backward", names, each, rounds, threads)
    for each in sizes if threads == 1 else []:
        names = [PARALLEL, SHARED, *([ORIGINAL] if each[0::2] == (256, 128) else [])]
        yield compared("forward", names, each, rounds)


# Peers are so much slower that three rounds tell enough. How many times slower than ours is in the row too.
def peers(sizes: list[Sizes]) -> Iterator[Row]:
    for each in sizes:
        names = ["labml-nn KV"] if installed("labml_nn") else []
        if each[:1] + each[2:3] in ((128, 128), (256, 128)):
            names += ["labml-nn original"] if names else []
            names += ["lucidrains"] if installed("feedback_transformer_pytorch") else []
        if not names:
            continue
        ours = [SHARED, *([ORIGINAL] if "labml-nn original" in names else [])]
        row = compared("forward+backward, peers", [PARALLEL, *ours, *names], each, rounds=3)
        slower = {n: {o: row["times"][n]["ratio"][o]["median"] for o in ours} for n in names}
        print(f"  times slower than ours: {slower}", flush=True)
        yield row | {"times_slower": slower}


# ## One token at a time
#
# After a text of T tokens; what the text was does not matter to the time.
WINDOW = 64


def stepping(name: str, d: int, layers: int, t: int, window: int | None = None) -> Callable[[], Any]:
    model, x = build(name, d, layers), torch.randn(1, d)
    if name == PARALLEL:
        caches = [(torch.randn(1, H, t + 1, d // H), torch.randn(1, H, t + 1, d // H)) for _ in range(layers)]

        def decode() -> None:
            h = x[None]
            with torch.no_grad():
                for layer, cache in zip(model[:-1], caches, strict=True):  # type: ignore[arg-type]
                    h = layer(h, cache, t)
                model[-1](h)  # type: ignore[operator]

        return decode
    model.window = window
    groups = layers if name == ORIGINAL else 1
    keys, values = torch.randn(2, t, 1, groups, H, d // H).unbind()
    state = FeedbackState.of(keys, values, None, window)

    # Time goes on from step to step, as in use: a state continued twice would copy itself.
    def step() -> None:
        nonlocal state
        with torch.no_grad(), form(name):
            state = model.step(x, state)[1]  # type: ignore[operator]

    return step


def decoding(sizes: list[tuple[int, int, int]], rounds: int) -> Iterator[Row]:
    for d, layers, t in sizes:
        candidates = {
            "parallel transformer, cached": stepping(PARALLEL, d, layers, t),
            "shared": stepping(SHARED, d, layers, t),
            PLAIN: stepping(PLAIN, d, layers, t),
            f"shared, window {WINDOW}": stepping(SHARED, d, layers, t, WINDOW),
            ORIGINAL: stepping(ORIGINAL, d, layers, t),
        }
        times = compare(candidates, rounds=rounds)
        faster = {n: r["median"] for n, r in times["parallel transformer, cached"]["ratio"].items()}
        per_second = {n: round(1 / v["median"]) for n, v in times.items()}
        print(
            f"decoding D={d} L={layers} after {t}: {faster} times the parallel one; {per_second} a second",
            flush=True,
        )
        row = {
            "what": "decoding one token",
            "D": d,
            "L": layers,
            "after": t,
            "B": 1,
            "H": H,
            "window": WINDOW,
        }
        yield row | {
            "rounds": rounds,
            "times_faster": faster,
            "tokens_per_second": per_second,
            "times": times,
        }


def memory(sizes: list[Sizes]) -> Iterator[Row]:
    for d, layers, t, b in sizes:
        kept = 0
        for name in (WRITTEN, PARALLEL, SHARED, RECOMPUTED, PLAIN, "labml-nn KV"):
            if name.startswith("labml") and not installed("labml_nn"):
                continue
            command = [sys.executable, __file__, "--peak", name, *(str(n) for n in (d, layers, t, b))]
            peak = peak_memory(command)
            kept = kept or peak
            row = {"what": "peak memory, forward+backward", "name": name, "D": d, "L": layers, "T": t, "B": b}
            row |= {"bytes": peak, "units_of_TBD": round(peak / (4 * t * b * d), 1)}
            row["over_parallel_with_probabilities"] = round(peak / kept, 3)
            print(row, flush=True)
            yield row


def rows(full: bool) -> Iterator[Row]:
    sizes, rounds = (SIZES, 7) if full else (SIZES[:1], 3)
    yield from speed(sizes, rounds)
    yield from decoding([(512, 6, 128), (256, 6, 256), *([(256, 6, 2048)] if full else [])], rounds)
    yield from memory([SIZES[1], SIZES[3]] if full else SIZES[:1])
    yield from peers(sizes)
    if full:
        yield from speed(sizes, rounds, threads=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest size, few rounds (the default)")
    parser.add_argument("--full", action="store_true", help="all sizes, 7 rounds, two threads as well")
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
    print(kernel.KERNEL.status())
    done: list[Row] = []
    for row in rows(chosen.full):
        done.append(row)
        path = write_results("feedback" if chosen.full else "feedback-quick", done, PACKAGES)
    print(path)


if __name__ == "__main__":
    main()

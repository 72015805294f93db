r"""Multi-head attention, measured: one module, causal, beside those of other libraries.

`python benchmarks/attention.py --quick` takes a minute or two, `--full` all sizes. Peers are compared where
they are installed (`benchmarks/peers.txt`, in an environment of their own, with `PYTHONPATH=src`).

All have the four linear layers of width D and the same heads; ours and two of the peers end in the fused
attention of PyTorch, labml-nn holds its weights. What is measured besides is what each puts around them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from measure import (
    compare,
    forward_pass,
    installed,
    peak_memory,
    print_peak,
    steady_malloc,
    training_pass,
    write_results,
)
from postil.masks import Mask
from postil.mixers.multi_head_attention import MultiHeadAttention

H = 8
OURS = "MultiHeadAttention"
PEERS = {
    "torch.nn.MultiheadAttention": "torch",
    "labml-nn MultiHeadAttention": "labml_nn",
    "x-transformers Attention": "x_transformers",
}
PACKAGES = ("labml-nn", "x-transformers")
SIZES = [(256, 8, 256), (1024, 2, 256), (1024, 2, 512), (4096, 1, 256)]


def candidate(name: str, t: int, b: int, d: int) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    """Build a module by name: the module, its call, and its input, time-major or as the peer wants it."""
    x = torch.randn(t, b, d)
    if name == OURS:
        module = MultiHeadAttention(H, d, 0.0)
        return module, lambda x: module(query=x, key=x, value=x, mask=Mask(causal=True)), x
    if name.startswith("torch"):
        module, mask = nn.MultiheadAttention(d, H), nn.Transformer.generate_square_subsequent_mask(t)
        return module, lambda x: module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0], x
    if name.startswith("labml-nn"):
        from labml_nn.transformers.mha import MultiHeadAttention as Theirs

        module, mask = Theirs(H, d, 0.0), torch.ones(t, t, dtype=torch.bool).tril()[:, :, None]
        return module, lambda x: module(query=x, key=x, value=x, mask=mask), x
    from x_transformers.x_transformers import Attention

    module = Attention(d, dim_head=d // H, heads=H, causal=True, flash=True)
    return module, module, x.transpose(0, 1).contiguous()


def names(t: int) -> list[str]:
    # Whoever holds the weights needs T * T numbers a head and text.
    there = [name for name, package in PEERS.items() if installed(package)]
    return [OURS, *(name for name in there if t <= 1024 or not name.startswith("labml-nn"))]


def speed(sizes: list[tuple[int, int, int]], rounds: int) -> Iterator[dict[str, Any]]:
    for t, b, d in sizes:
        for kind, make in (("forward", forward_pass), ("forward+backward", training_pass)):
            times = compare({name: make(*candidate(name, t, b, d)) for name in names(t)}, rounds=rounds)
            against = {name: v["ratio"][OURS]["median"] for name, v in times.items() if name != OURS}
            print(f"{kind:17} T={t} B={b} D={d}: times slower than ours: {against}", flush=True)
            yield (
                {"what": kind, "T": t, "B": b, "D": d, "H": H, "rounds": rounds, "threads": 1}
                | {"times_slower_than_ours": against, "times": times}
            )


def memory(lengths: list[int]) -> Iterator[dict[str, Any]]:
    for t in lengths:
        for name in names(t):
            peak = peak_memory([sys.executable, __file__, "--peak", name, str(t)])
            row = {"what": "peak memory, forward+backward", "name": name, "T": t, "B": 1, "D": 256}
            print(row | {"bytes": peak}, flush=True)
            yield row | {"bytes": peak, "units_of_TBD": round(peak / (4 * t * 256), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, few rounds (the default)")
    parser.add_argument("--full", action="store_true", help="all sizes, 9 rounds")
    parser.add_argument("--peak", nargs=2, metavar=("NAME", "T"), help="print the peak memory of one run")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if chosen.peak:
        name, t = chosen.peak[0], int(chosen.peak[1])
        training_pass(*candidate(name, 64, 1, 256))()
        print_peak(lambda: training_pass(*candidate(name, t, 1, 256))())
        return
    steady_malloc()
    rows = list(speed(SIZES if chosen.full else SIZES[:2], 9 if chosen.full else 5))
    print(write_results("attention" if chosen.full else "attention-quick", rows, PACKAGES))


if __name__ == "__main__":
    main()

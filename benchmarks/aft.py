r"""The Attention Free Transformer, measured.

`python benchmarks/aft.py --quick` takes some minutes, `--full` all sizes of the table. Peers are compared
where they are installed (`benchmarks/peers.txt`, in an environment of their own, with `PYTHONPATH=src`).

Every module is measured whole, with its four linear layers, which are also measured alone: no module of this
shape can be faster. All are causal but the peers that cannot be. Ratios are of times within one round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
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
from postil.mixers.aft import AFTConv, AFTFull, AFTLocal, AFTSimple, aft_local, kernel
from postil.mixers.multi_head_attention import MultiHeadAttention

WINDOW = 32
PLAIN = "AFTLocal, plain form"
CAUSAL = Mask(causal=True)
PEERS = {"labml-nn AFTLocal": "labml_nn", "aft-pytorch AFTFull": "aft_pytorch", "aft-pt AFTFull": "aft_pt"}
PACKAGES = ("labml-nn", "aft-pytorch", "aft-pt")
SIZES = [(256, 32, 256), (1024, 8, 256), (4096, 4, 128), (4096, 4, 256), (16384, 1, 256), (65536, 1, 256)]


class Linears(nn.Module):
    """The four linear layers, three side by side and one after them, and nothing between."""

    def __init__(self, d_model: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, o = self.layers
        return o(_Last.apply(q(x), k(x), v(x)))


# Passing one tensor on, and its gradient back to all three, costs nothing: no sum, no copy.
class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return g, g, g


class Attention(nn.Module):
    """PyTorch's scaled dot-product attention between the same four layers, batch first."""

    def __init__(self, d_model: int, heads: int = 8):
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, o = self.layers
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (q, k, v))
        return o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def candidate(name: str, t: int, b: int, d: int) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    """Build a module by name: the module, its call, and its input, time-major or as the peer wants it."""
    x = torch.randn(t, b, d)
    if name == "linear layers":
        module = Linears(d)
        return module, module, x
    if name == "SDPA attention":
        module = Attention(d)
        return module, module, x.transpose(0, 1).contiguous()
    if name == "labml-nn AFTLocal":
        from labml_nn.transformers.aft import AFTLocal as Theirs

        module, mask = Theirs(d, t, WINDOW), torch.ones(t, t, dtype=torch.bool).tril()[:, :, None]
        return module, lambda x: module(query=x, key=x, value=x, mask=mask), x
    if name in ("aft-pytorch AFTFull", "aft-pt AFTFull"):
        package = __import__(name.split()[0].replace("-", "_"))
        module = package.AFTFull(max_seqlen=t, dim=d, hidden_dim=d)
        return module, module, x.transpose(0, 1).contiguous()
    module = {
        "AFTLocal": lambda: AFTLocal(d, t, WINDOW),
        PLAIN: lambda: AFTLocal(d, t, WINDOW),
        "AFTSimple": lambda: AFTSimple(d),
        "AFTConv": lambda: AFTConv(8, d, WINDOW),
        "AFTFull": lambda: AFTFull(d, t),
    }[name]()
    for parameter in module.parameters():
        if parameter.dim() == 2 and not parameter.any():
            nn.init.normal_(parameter)
    return module, lambda x: module(query=x, key=x, value=x, mask=CAUSAL), x


# The kernel is taken wherever it fits. To measure the plain form beside it, it is told that it does not.
def formed(name: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """Let a run compute by the form that is asked for."""
    return patch.object(kernel, "fits", lambda *problem: False)(run) if name == PLAIN else run


# labml-nn's tables of T * T numbers fit into this machine's memory at T = 16,384 without their gradients.
def names(t: int, kind: str, *, variants: bool) -> list[str]:
    chosen = ["linear layers", "AFTLocal", PLAIN, *(["AFTSimple", "AFTConv"] if variants else [])]
    if t <= 16384:
        chosen.append("SDPA attention")
    if t <= 4096:
        chosen += ["AFTFull"] if variants else []
        chosen += [name for name, package in PEERS.items() if installed(package)]
    elif t <= 16384 and kind == "forward":
        chosen += [name for name, package in PEERS.items() if name.startswith("labml") and installed(package)]
    return chosen


def speed(sizes: list[tuple[int, int, int]], rounds: int, *, variants: bool) -> Iterator[dict[str, Any]]:
    for t, b, d in sizes:
        for kind, make in (("forward", forward_pass), ("forward+backward", training_pass)):
            runs = {
                name: formed(name, make(*candidate(name, t, b, d)))
                for name in names(t, kind, variants=variants)
            }
            times = compare(runs, rounds=rounds)
            against = {n: times[n]["ratio"].get("AFTLocal", {}).get("median", 1.0) for n in times}
            floor = times["AFTLocal"]["ratio"]["linear layers"]
            print(f"{kind:17} T={t} B={b} D={d}: {floor['median']:.2f} x linear layers; slower: {against}")
            yield (
                {"what": kind, "T": t, "B": b, "D": d, "window": WINDOW, "rounds": rounds, "threads": 1}
                | {"over_linear_layers": floor, "times_slower_than_AFTLocal": against, "times": times}
            )


def memory(lengths: list[int]) -> Iterator[dict[str, Any]]:
    for name in ("AFTLocal", PLAIN, "labml-nn AFTLocal", "linear layers"):
        for t in lengths:
            if name.startswith("labml") and (t > 4096 or not installed(PEERS[name])):
                continue
            peak = peak_memory([sys.executable, __file__, "--peak", name, str(t)])
            row = {"what": "peak memory, forward+backward", "name": name, "T": t, "B": 1, "D": 256}
            row |= {"bytes": peak, "units_of_TBD": round(peak / (4 * t * 256), 2)}
            print(row)
            yield row


def relative_rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt())


# The truth is the same form in float64, which equals the literal equation to 1e-10 (tests), on the same
# rounded numbers; the literal one would need T * T numbers a channel.
def errors(lengths: list[int]) -> Iterator[dict[str, Any]]:
    for t in lengths:
        q, k, v = (torch.randn(t, 1, 8) for _ in range(3))
        ordinary, wild = torch.randn(t, 2 * WINDOW - 1), 100 * torch.rand(t, 2 * WINDOW - 1) - 50
        ramp = torch.linspace(-200, 200, t)[:, None, None]
        for label, keys, band in (
            ("ordinary", k, ordinary),
            ("keys ramp up by 400", k + ramp, ordinary),
            ("keys ramp down by 400", k - ramp, ordinary),
            ("biases within 50", k, wild),
            ("both, up", k + ramp, wild),
            ("both, down", k - ramp, wild),
        ):
            row: dict[str, Any] = {"what": "relative RMS error", "input": label, "T": t, "window": WINDOW}
            for dtype in (torch.float32, torch.bfloat16):
                given = [x.to(dtype) for x in (q, keys, v, band)]
                truth = aft_local(*(x.double() for x in given), CAUSAL)
                row[str(dtype).removeprefix("torch.")] = relative_rms(aft_local(*given, CAUSAL), truth)
                del truth
            print(row)
            yield row


def decoding(tokens: int, d: int = 256) -> list[dict[str, Any]]:
    local, attention, linears = (
        AFTLocal(d, 4 * tokens, WINDOW),
        MultiHeadAttention(8, d, 0.0).eval(),
        Linears(d),
    )
    x, x_t = torch.randn(4 * tokens, 1, d), torch.randn(1, d)
    rows = []
    with torch.no_grad():
        for before in (10, tokens - 1, 4 * tokens - 1):
            states = {
                name: m.prefill(x[:before])[1] for name, m in (("AFTLocal", local), ("attention", attention))
            }
            runs = {
                "AFTLocal": lambda s=states: local.step(x_t, s["AFTLocal"]),
                "attention, cached": lambda s=states: attention.step(x_t, s["attention"]),
                "linear layers": lambda: linears(x_t),
            }
            rows.append(
                {"what": "decoding one token", "after": before, "B": 1, "D": d, "times": compare(runs)}
            )
            print(before, {n: v["median"] for n, v in rows[-1]["times"].items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three sizes (the default)")
    parser.add_argument("--full", action="store_true", help="all sizes, memory and error to T=65536")
    parser.add_argument("--peak", nargs=2, metavar=("NAME", "T"), help="print the peak memory of one run")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if chosen.peak:
        name, t = chosen.peak[0], int(chosen.peak[1])
        formed(name, training_pass(*candidate(name, 64, 1, 256)))()
        print_peak(lambda: formed(name, training_pass(*candidate(name, t, 1, 256)))())
        return
    steady_malloc()
    print(kernel.KERNEL.status())
    measured = chain(
        speed(SIZES if chosen.full else SIZES[:2] + SIZES[3:4], rounds=7, variants=True),
        decoding(1000),
        errors([4096, 65536] if chosen.full else [4096]),
        memory([1024, 4096, 16384, 65536] if chosen.full else [1024, 4096]),
    )
    # Written after every row: a run that is cut short has measured what it has measured.
    rows = []
    for row in measured:
        rows.append(row)
        path = write_results("aft" if chosen.full else "aft-quick", rows, PACKAGES)
    print(path)


if __name__ == "__main__":
    main()

r"""What a model of a billion parameters, texts of a million tokens and a thousand GPUs would need.

Nobody has such machines at hand, so this is arithmetic: sizes of tensors, and what each strategy stores and
sends. Each formula that can be is held against real objects in `tests/distributed/test_scaling.py`: shapes
against the models themselves, shares and messages against PyTorch's own sharding over a simulated group of
processes, activations against what a backward pass really keeps.

    python benchmarks/scaling.py        the tables of docs/scaling.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = [
    "Cluster",
    "Sizes",
    "activations",
    "assembled",
    "chain",
    "handover",
    "parameters",
    "shapes",
    "stored",
    "tables",
    "traffic",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    r"""A language model without position embeddings, whose generator is not tied to the embedding."""

    mixer: str
    d_model: int = 2048
    n_layers: int = 20
    heads: int = 16
    seq_len: int = 1_000_000
    vocab: int = 32_000
    window: int = 32
    """Window of aft-local, kernel of aft-conv, distances that the Feedback Transformer tells apart."""


@dataclass(frozen=True)
class Cluster:
    r"""GPUs of today: bytes of memory, operations and bytes a second, and the least time of one message."""

    gpus: int = 1000
    memory: float = 80e9
    flops: float = 4e14
    memory_bandwidth: float = 3.3e12
    network: float = 50e9
    latency: float = 10e-6


# ## Sizes
def shapes(sizes: Sizes) -> tuple[list[Shape], list[Shape]]:
    r"""Give the shapes of all parameters: those of one layer, and those outside the layers.

    A Feedback Transformer is computed as one, so its layers are one unit, and come as one list.
    """
    d, hidden = sizes.d_model, 4 * sizes.d_model
    feed_forward = [(hidden, d), (hidden,), (d, hidden), (d,)]
    norms = [(d,)] * 4
    outside = [(sizes.vocab, d), (sizes.vocab, d), (sizes.vocab,)]
    if sizes.mixer == "feedback":
        head = d // sizes.heads
        tables = [(sizes.window, sizes.heads, head), (sizes.window, sizes.heads), (sizes.heads, head)]
        layer = [*feed_forward, *norms, *tables, (d, d), (d, d), (d,)]
        return layer * sizes.n_layers + [(sizes.n_layers + 1,), (d,), (d,), (d, d), (d, d)], outside
    linear = [(d, d), (d,)]
    mixing: dict[str, list[Shape]] = {
        "multi-head-attention": linear * 4,
        "aft-full": [*linear * 4, (sizes.seq_len, sizes.seq_len)],
        "aft-local": [*linear * 4, (sizes.seq_len, 2 * sizes.window - 1)],
        "aft-simple": linear * 4,
        "aft-conv": [
            *linear * 3,
            (sizes.heads, d),
            *[(sizes.heads,)] * 3,
            (sizes.heads, sizes.window),
        ],
    }
    return [*mixing[sizes.mixer], *feed_forward, *norms], [*outside, (d,), (d,)]


def units(sizes: Sizes) -> list[list[Shape]]:
    r"""Give the parts that sharding puts together one at a time: the layers, and what stands around them."""
    layer, outside = shapes(sizes)
    return [layer] * (1 if sizes.mixer == "feedback" else sizes.n_layers) + [outside]


def parameters(sizes: Sizes) -> int:
    r"""Count the parameters."""
    return sum(math.prod(shape) for unit in units(sizes) for shape in unit)


# Each parameter is cut along its first axis into equal shares, filled up with nothing where it does not
# divide. With many processes that is no longer little: 2048 rows over 1000 processes are 3 rows each, so
# 952 of 3000 are empty and 317 processes hold nothing.
def padded(shape: Shape, world: int) -> int:
    r"""Give the numbers of a parameter's shares together, empty rows included."""
    return math.ceil(shape[0] / world) * world * math.prod(shape[1:])


def stored(sizes: Sizes, strategy: str, world: int) -> float:
    r"""Give the bytes of parameters, gradients and AdamW's two moments in one process, in float32."""
    share = (lambda shape: padded(shape, world) / world) if strategy == "fsdp" else math.prod
    return 16 * sum(share(shape) for unit in units(sizes) for shape in unit)


def assembled(sizes: Sizes) -> float:
    r"""Give the bytes that sharding needs besides: the largest unit put together, and its gradient."""
    return 8 * max(sum(map(math.prod, unit)) for unit in units(sizes))


# ## Messages
BUCKET = 25 * 2**20
"""Bytes of gradients that PyTorch's DDP adds up in one message."""


def traffic(sizes: Sizes, strategy: str, world: int, micro_batches: int = 1) -> tuple[int, float]:
    r"""Give messages and bytes that one process sends in an update, by ring algorithms, in float32.

    ddp: all gradients are added up once, in buckets, each byte sent twice. fsdp: each unit is put together
    for the forward and again for the backward pass, and its gradients are added up, for every micro-batch.
    """
    ring = 4 * (world - 1) / world
    if strategy == "ddp":
        return math.ceil(4 * parameters(sizes) / BUCKET), 2 * ring * parameters(sizes)
    whole = sum(padded(shape, world) for unit in units(sizes) for shape in unit)
    return 3 * len(units(sizes)) * micro_batches, 3 * ring * whole * micro_batches


# Sums over all processes go up and down a tree; to put a unit together, the shares go round a ring.
def waiting(strategy: str, world: int, messages: int, cluster: Cluster) -> float:
    r"""Give the seconds that messages take if they are empty."""
    hops = 2 * math.ceil(math.log2(world)) if strategy == "ddp" else world - 1
    return messages * hops * cluster.latency


# ## Activations
# Measured on small models, in units of one float32 tensor `[T, B, D]`. A Feedback Transformer also keeps its
# attention probabilities, `heads * T` numbers a position, with 16 columns to spare; a window hides but does
# not shrink them.
UNITS = {
    "multi-head-attention": 12.2,
    "aft-full": 13.1,
    "aft-local": 13.3,
    "aft-simple": 13.2,
    "aft-conv": 11.6,
    "feedback": 11.0,
}


def activations(sizes: Sizes, tokens: int, recompute: bool = False) -> float:
    r"""Give the bytes that the layers keep for the backward pass of `tokens` tokens, B times T.

    With `recompute` (activation checkpointing), the inputs of the layers and one layer's activations.
    """
    each = UNITS[sizes.mixer]
    if sizes.mixer == "feedback":
        each += sizes.heads * (sizes.seq_len + 16) / sizes.d_model
    layers = sizes.n_layers + each if recompute else sizes.n_layers * each
    return 4 * layers * tokens * sizes.d_model


# ## Time
def chain(sizes: Sizes, cluster: Cluster, tensor_parallel: int = 1) -> float:
    r"""Give the seconds that one text takes a Feedback Transformer at least, forward, on any number of GPUs.

    Each position waits for the one before and needs every weight once; GPUs that share the weights of a
    layer wait for each other twice a layer.
    """
    weights = 2 * parameters(sizes) / (cluster.memory_bandwidth * tensor_parallel)
    waiting = 2 * sizes.n_layers * cluster.latency if tensor_parallel > 1 else 0.0
    return sizes.seq_len * (weights + waiting)


def handover(sizes: Sizes, rows: int = 1) -> int:
    r"""Give the bytes of an AFT layer's state: what the GPU with the next part of the text must be told."""
    carried = {"aft-simple": 3, "aft-local": 3 + 2 * (sizes.window - 1)}
    return 4 * carried[sizes.mixer] * rows * sizes.d_model


# ## The tables
def tables(cluster: Cluster = Cluster()) -> str:
    r"""Write the tables of docs/scaling.md."""
    lines = [
        "| mixer | parameters | position tables | ddp, GB a GPU | fsdp, GB a GPU | and a whole unit, GB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in UNITS:
        sizes = Sizes(name)
        count, short = parameters(sizes), parameters(replace(sizes, seq_len=1))
        lines.append(
            f"| {name} | {_short(count)} | {_short(count - short)} | "
            f"{_gb(stored(sizes, 'ddp', cluster.gpus))} | {_gb(stored(sizes, 'fsdp', cluster.gpus))} | "
            f"{_gb(assembled(sizes))} |"
        )
    lines += [
        "",
        "| strategy, aft-simple | messages | GB sent a GPU | seconds at 50 GB/s | seconds of waiting |",
        "| --- | --- | --- | --- | --- |",
    ]
    for strategy, world, micro in (
        ("ddp", 1000, 1),
        ("ddp", 1000, 4),
        ("fsdp", 8, 1),
        ("fsdp", 1000, 1),
        ("fsdp", 1000, 4),
    ):
        count, sent = traffic(Sizes("aft-simple"), strategy, world, micro)
        idle = waiting(strategy, world, count, cluster)
        label = f"{strategy}, {world} GPUs, {micro} micro-batch{'es' if micro > 1 else ''}"
        lines.append(f"| {label} | {count} | {_gb(sent)} | {sent / cluster.network:.2f} | {idle:.2f} |")
    lines += [
        "",
        "| one text of 1M tokens | activations, GB | recomputed, GB | GPUs it must be cut over |",
        "| --- | --- | --- | --- |",
    ]
    for name in ("aft-local", "aft-simple", "aft-conv", "feedback"):
        sizes = Sizes(name)
        kept = activations(sizes, sizes.seq_len)
        again = activations(sizes, sizes.seq_len, recompute=True)
        room = cluster.memory - stored(sizes, "fsdp", cluster.gpus) - assembled(sizes)
        cut = f"{_gb(again)} | {math.ceil(again / room)}" if name != "feedback" else "- | -"
        lines.append(f"| {name} | {_gb(kept)} | {cut} |")
    short = replace(Sizes("feedback"), seq_len=512)
    lines.append(f"| feedback, 512 tokens at a time | {_gb(activations(short, 512))} | - | 1 |")
    sizes = Sizes("feedback")
    lines += [
        "",
        f"| feedback, one text of 1M tokens, forward | minutes at least |\n| --- | --- |\n"
        f"| one GPU holds a text | {chain(sizes, cluster) / 60:.0f} |\n"
        f"| 8 GPUs share the weights of every layer | {chain(sizes, cluster, 8) / 60:.0f} |\n"
        f"| a parallel model of the same size, one GPU | "
        f"{2 * parameters(sizes) * sizes.seq_len / cluster.flops / 60:.2f} |",
    ]
    return "\n".join(lines) + "\n"


def _short(n: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if n >= size:
            return f"{n / size:.2f} {letter}"
    return f"{n:.0f}"


def _gb(n: float) -> str:
    return f"{n / 1e9:,.2f}"


if __name__ == "__main__":
    print(tables(), end="")

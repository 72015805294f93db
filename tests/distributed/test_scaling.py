"""The formulas of the plan for a thousand GPUs, against real models and PyTorch's own sharding."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import scaling
from postil.registry import ModelSettings, build_backbone, build_language_model

ROOT = Path(__file__).parents[2]
MIXERS = list(scaling.UNITS)
OPTIONS = {"aft-local": "local_window_size", "aft-conv": "kernel_size", "feedback": "positions"}


def model_settings(sizes: scaling.Sizes) -> ModelSettings:
    options = {OPTIONS[sizes.mixer]: sizes.window} if sizes.mixer in OPTIONS else {}
    if sizes.mixer == "feedback" and sizes.window < sizes.seq_len:
        options["window"] = sizes.window
    return ModelSettings(
        d_model=sizes.d_model,
        n_layers=sizes.n_layers,
        heads=sizes.heads,
        seq_len=sizes.seq_len,
        dropout=0.0,
        positions="none",
        options=options,
    )


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_shapes_are_those_of_the_models(mixer: str) -> None:
    """At small sizes all of them, one by one; at the plan's size their sum, on a device without memory."""
    small = scaling.Sizes(mixer, d_model=32, n_layers=3, heads=4, seq_len=64, vocab=50, window=8)
    sizes = [small, scaling.Sizes(mixer, seq_len=2048 if mixer == "aft-full" else 1_000_000)]
    for each in sizes:
        with torch.device("meta"):
            model = build_language_model(mixer, model_settings(each), each.vocab)
        found = Counter(tuple(p.shape) for p in model.parameters())
        expected = Counter(shape for unit in scaling.units(each) for shape in unit)
        assert found == expected
        assert sum(p.numel() for p in model.parameters()) == scaling.parameters(each)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(("length", "width", "batch"), [(128, 64, 2), (256, 64, 2), (128, 32, 3)])
def test_activations_are_what_a_backward_pass_keeps(mixer: str, length: int, width: int, batch: int) -> None:
    def kept(layers: int) -> int:
        sizes = scaling.Sizes(
            mixer, d_model=width, n_layers=layers, heads=8, seq_len=length, vocab=50, window=16
        )
        backbone = build_backbone(mixer, model_settings(sizes))
        own = {p.untyped_storage().data_ptr() for p in backbone.parameters()}
        found: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backbone(torch.randn(length, batch, width, requires_grad=True))
        return sum(tensor.untyped_storage().nbytes() for tensor in found.values())

    sizes = scaling.Sizes(mixer, d_model=width, n_layers=2, heads=8, seq_len=length, vocab=50, window=16)
    # What stands outside the layers falls out of the difference.
    formula = scaling.activations(sizes, length * batch)
    assert kept(4) - kept(2) == pytest.approx(formula, rel=0.15)


# PyTorch can pretend to be one of many processes: nothing is sent, but everything is cut and asked for. One
# group lives as long as its process, so each size has a process of its own.
SIMULATED = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from postil.language_model import NextTokenLoss
from postil.registry import ModelSettings, build_language_model
from postil.training.sharding import recompute_layers, shard

settings, mixer, vocab, world = json.loads(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
settings = ModelSettings(**settings)

class Messages(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.gathered, self.scattered = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_allgather_base_" in str(function):
            self.gathered.append(args[0].numel())
        if "_reduce_scatter_base_" in str(function):
            self.scattered.append(args[1].numel())
        return function(*args, **(kwargs or {}))

ids = torch.zeros(1, settings.seq_len, dtype=torch.int64)
loss = NextTokenLoss(build_language_model(mixer, settings, vocab))
buckets = []
if world <= 64:
    replica = torch.nn.parallel.DistributedDataParallel(
        NextTokenLoss(build_language_model(mixer, settings, vocab)), init_sync=False)
    def hook(state, bucket):
        buckets.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    replica.register_comm_hook(None, hook)
    replica(ids, ids)[0].backward()
shard(loss, init_device_mesh("cpu", (world,), mesh_dim_names=("data_parallel",)))
optimizer = torch.optim.AdamW(loss.parameters())
with Messages() as messages:
    loss(ids, ids)[0].backward()
optimizer.step()
local = sum(p.to_local().numel() for p in loss.parameters())
slots = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
moments = sum(t.to_local().numel() for t in slots)
print(json.dumps({"gathered": messages.gathered, "scattered": messages.scattered, "local": local,
                  "moments": moments, "buckets": buckets}))
"""


@pytest.mark.parametrize(
    ("mixer", "world"),
    [
        ("aft-local", 8),
        ("feedback", 8),
        pytest.param("aft-simple", 1000, marks=pytest.mark.slow),
        pytest.param("aft-full", 6, marks=pytest.mark.slow),
        pytest.param("aft-conv", 8, marks=pytest.mark.slow),
        pytest.param("multi-head-attention", 64, marks=pytest.mark.slow),
    ],
)
def test_shares_and_messages_are_those_of_simulated_processes(mixer: str, world: int) -> None:
    import json

    sizes = scaling.Sizes(mixer, d_model=32, n_layers=3, heads=4, seq_len=16, vocab=50, window=8)
    request = json.dumps([vars(model_settings(sizes)), mixer, sizes.vocab, world])
    done = subprocess.run([sys.executable, "-c", SIMULATED, request], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    count, sent = scaling.traffic(sizes, "fsdp", world)
    assert len(found["gathered"]) + len(found["scattered"]) == count
    # In a ring each process passes on all shares but one of every message.
    moved = sum(found["gathered"]) + sum(found["scattered"])
    assert 4 * moved * (world - 1) / world == pytest.approx(sent)
    # The first process holds a full share of everything, padding never falls on it.
    assert 16 * found["local"] == scaling.stored(sizes, "fsdp", world)
    assert found["moments"] == 2 * found["local"]
    if found["buckets"]:
        _, sent = scaling.traffic(sizes, "ddp", world)
        assert 8 * sum(found["buckets"]) * (world - 1) / world == pytest.approx(sent)


def test_a_state_handed_over_does_not_grow_with_the_text() -> None:
    short = scaling.Sizes("aft-local", seq_len=1000)
    assert scaling.handover(short) == scaling.handover(replace(short, seq_len=1_000_000)) < 2**20


def test_the_document_holds_the_tables_that_the_formulas_give() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    for table in scaling.tables().split("\n\n"):
        assert table.strip() in text, "run `python benchmarks/scaling.py` and put its tables in"


def test_sharding_a_thousandfold_pads_rows() -> None:
    assert scaling.padded((2048, 2), 1000) == 3000 * 2
    assert scaling.padded((2048, 2), 8) == 2048 * 2
    assert math.isclose(scaling.stored(scaling.Sizes("aft-simple"), "fsdp", 1) / 16, 1.14e9, rel_tol=0.01)

r"""The engine: one process on a laptop or many on many machines, by Lightning Fabric.

There are two ways to train one model in several processes, each reading its own share of every batch:

- **ddp**: each process holds the whole model, and all average their gradients;
- **fsdp**: each process holds a share of every layer, of its gradient and of its optimizer state. A layer is
  put together when it is computed, and taken apart again. The same numbers, less memory, more traffic.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from lightning_fabric.strategies.strategy import Strategy
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from postil.training.processes import RankError, is_rank, meeting_point, report_error
from postil.training.settings import TrainSettings
from postil.training.sharding import shard
from postil.training.watch import Watch

__all__ = ["as_launched", "largest", "make_fabric", "summed", "together"]

# When one process dies or hangs, the others wait in a collective operation. The engine's default lets them
# wait for half an hour.
TIMEOUT = timedelta(seconds=60)


def as_launched(settings: TrainSettings) -> TrainSettings:
    r"""Under `torchrun`, give the settings with the numbers of devices and nodes that it started."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return settings
    devices, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    return replace(settings, devices=devices, nodes=world // devices)


def make_fabric(settings: TrainSettings) -> Fabric:
    r"""Set up devices, precision and strategy as the settings say; processes meet in `together`.

    Raises:
        ValueError: the device is not there, or the precision not possible on it.
    """
    accelerator = settings.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cuda" and torch.cuda.device_count() < settings.devices:
        raise ValueError(
            f"accelerator='cuda' with devices={settings.devices}, but this machine has "
            f"{torch.cuda.device_count()}; take fewer, or accelerator='cpu'"
        )
    if accelerator == "cpu" and settings.precision == "16-mixed":
        raise ValueError("precision='16-mixed' needs a GPU; on a CPU take bf16-mixed or 32")
    if settings.nodes > 1 and not is_rank():
        raise ValueError(
            f"nodes={settings.nodes}: on each machine start `torchrun --nnodes {settings.nodes} "
            f"--nproc-per-node {settings.devices} --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
            f"-m postil.cli train ...` with the same options"
        )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    # It announces every connection in capitals, in every process.
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    return Fabric(
        accelerator=accelerator,
        devices=settings.devices,
        num_nodes=settings.nodes,
        strategy=_strategy(settings),
        precision="32-true" if settings.precision == "32" else settings.precision,  # type: ignore[arg-type]
        plugins=_environment(settings),
    )


def _strategy(settings: TrainSettings) -> Strategy | str:
    if settings.world_size == 1:
        return "auto"
    if settings.strategy == "fsdp":
        return ModelParallelStrategy(
            shard, data_parallel_size=settings.world_size, tensor_parallel_size=1, timeout=TIMEOUT
        )
    # Buffers are constants here (position tables). To send them about at every call would also make the
    # processes wait for each other in an evaluation, in which some have one batch less than others.
    return DDPStrategy(timeout=TIMEOUT, forward_sync_buffers=False)


def _environment(settings: TrainSettings) -> list[Any]:
    if settings.world_size == 1:
        return []
    return [TorchElasticEnvironment() if TorchElasticEnvironment.detect() else LightningEnvironment()]


@contextmanager
def together(settings: TrainSettings, fabric: Fabric) -> Iterator[None]:
    r"""In this block the processes of a run can talk to each other, and lose no one without saying so.

    Raises:
        RankError: another process was lost; it is named.
    """
    if settings.world_size == 1:
        fabric.launch()
        yield
        return
    store = meeting_point(TIMEOUT)
    _meet(settings, fabric, store)
    fabric.launch()

    def last_words(message: str) -> None:
        report_error(RankError(message), store)

    with Watch(fabric.global_rank, fabric.world_size, _own_connection(), last_words) as watch:
        try:
            yield
            # Nobody leaves before all are done: whoever is missed by the others would count as lost.
            fabric.barrier()
        except RuntimeError as error:
            lost = watch.who_was_lost(
                timed_out=re.search("time(d |-)?out", str(error), re.IGNORECASE) is not None
            )
            if lost is None:
                raise
            raise RankError(lost) from error
    dist.destroy_process_group()


# Fabric takes a group of processes that is there already.
def _meet(settings: TrainSettings, fabric: Fabric, store: Store | None) -> None:
    if store is not None:
        on_gpu = fabric.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore("group", store),
            rank=int(os.environ["LOCAL_RANK"]),
            world_size=settings.world_size,
            timeout=TIMEOUT,
            device_id=fabric.device if on_gpu else None,
        )


def _own_connection() -> Store:
    store = meeting_point(TIMEOUT)
    if store is None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, None, False, TIMEOUT)
    # `torchrun` may start all processes again at the same meeting point, where the old numbers still stand.
    return PrefixStore(f"watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


# ## What all processes must know
def summed(fabric: Fabric, x: Tensor) -> Tensor:
    r"""Add a tensor up over all processes, in place where it can be."""
    return _reduced(fabric, x, dist.ReduceOp.SUM)


def largest(fabric: Fabric, x: Tensor) -> Tensor:
    r"""Take the largest of a tensor's values over all processes, each element by itself."""
    return _reduced(fabric, x, dist.ReduceOp.MAX)


def _reduced(fabric: Fabric, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if fabric.world_size > 1:
        x = x.to(fabric.device)
        dist.all_reduce(x, operation)
    return x

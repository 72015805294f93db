r"""The engine: one process on a laptop or many on many machines, by Lightning Fabric."""

from __future__ import annotations

from datetime import timedelta

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.strategy import Strategy

from postil.training.settings import TrainSettings

__all__ = ["make_fabric"]

# When one process dies or hangs, the others wait in a collective operation. The engine's default lets them
# wait for half an hour.
TIMEOUT = timedelta(seconds=60)


def make_fabric(settings: TrainSettings) -> Fabric:
    r"""Set up devices, precision and strategy as the settings say; processes start at `launch`.

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
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return Fabric(
        accelerator=accelerator,
        devices=settings.devices,
        num_nodes=settings.nodes,
        strategy=_strategy(settings),
        precision="32-true" if settings.precision == "32" else settings.precision,  # type: ignore[arg-type]
    )


def _strategy(settings: TrainSettings) -> Strategy | str:
    if settings.world_size == 1:
        return "auto"
    if settings.strategy == "fsdp":
        raise ValueError("strategy='fsdp' is not ready yet; take ddp")
    return DDPStrategy(timeout=TIMEOUT)

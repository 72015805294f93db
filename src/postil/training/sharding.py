r"""A model in shares: which parts of it are cut, and how the whole comes back.

A process that holds one share of each parameter cannot save or sample alone. Checkpoints are always of whole
tensors, so that a run may go on in any number of processes, and on one laptop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from postil.language_model import LanguageModel, NextTokenLoss
from postil.mixers.feedback.backbone import FeedbackBackbone
from postil.transformer.encoder_decoder import CausalStack

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["full", "gathered", "recompute_layers", "shard", "share", "whole"]


# The layers of a Feedback Transformer read each other's outputs at every position and are computed by one
# function. Such a backbone is one unit: all of it is put together at once.
def _units(model: LanguageModel) -> list[nn.Module]:
    backbone = model.backbone
    return list(backbone.layers) if isinstance(backbone, CausalStack) else [backbone]  # type: ignore[list-item]


def shard(loss: NextTokenLoss, mesh: DeviceMesh) -> NextTokenLoss:
    r"""Cut every layer, and what stands around them, into shares over the processes, in place.

    A process then holds $1/n$ of parameters, gradients and moments, and one whole layer while it computes it.

    Source: [zhao2023]; the way of cutting each parameter along its first axis is that of PyTorch's FSDP2.
    """
    over = mesh["data_parallel"]
    for unit in _units(loss.model):
        fully_shard(unit, mesh=over, reshard_after_forward=True)
    # By default the outermost unit stays whole after a forward pass, to save one exchange before the backward
    # pass. An evaluation has no backward pass, and a checkpoint after it would find half of the model whole.
    fully_shard(loss, mesh=over, reshard_after_forward=True)
    return loss


# The names of parameters must not tell how a run saved memory, so no module is wrapped: the layer's own
# `forward` is replaced.
def recompute_layers(model: LanguageModel) -> None:
    r"""Keep only the input of each layer for the backward pass, which computes the layer again.

    Memory: one layer's activations and $L$ inputs, in place of $L$ layers' activations. Cost: one more
    forward pass, a third more time. The layers of a Feedback Transformer depend on each other at every
    position and are computed as one; there only attention's probabilities are not kept, the part that grows
    with the square of the length.

    Raises:
        ValueError: the backbone is neither a stack of layers nor a Feedback Transformer.
    """
    if isinstance(model.backbone, FeedbackBackbone):
        model.backbone.recompute = True
        return
    if not isinstance(model.backbone, CausalStack):
        raise ValueError(
            f"activation_checkpointing=True needs a stack of layers or a Feedback Transformer, not "
            f"{type(model.backbone).__name__}. Take optimizer.micro_batch_size, which saves memory for every "
            f"model"
        )
    for layer in model.backbone.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


# To put a tensor together is an exchange between all, so every process must ask for each of them, whether it
# keeps the answer or not, and in the same order. That of a dictionary will not do: what was read from a file
# stands in another order in each process. Two names of one tensor stay one tensor.
def whole(tensors: Mapping[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    r"""Put shared tensors together, one at a time; where `keep` is false, only help and return nothing.

    Memory: with `keep` all of them on the CPU, otherwise the largest.
    """
    found: dict[int, Tensor] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if isinstance(tensor, DTensor) and id(tensor) not in found:
            complete = full(tensor.detach())
            found[id(tensor)] = complete.cpu() if keep else complete.new_empty(0)
    return {name: found.get(id(tensor), tensor) for name, tensor in tensors.items()} if keep else {}


def share(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    r"""Cut whole tensors as the parameters of the same names are cut, each process its own share.

    A tensor of an optimizer is named `<parameter>.<slot>`, and cut if it has the parameter's shape.
    """

    def cut(name: str, tensor: Tensor) -> Tensor:
        like = parameters.get(name, parameters.get(name.rpartition(".")[0]))
        if not isinstance(like, DTensor) or like.shape != tensor.shape:
            return tensor
        tensor = tensor.to(like.device)
        # Everyone has read the whole tensor, so nothing need be sent.
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

    return {name: cut(name, tensor) for name, tensor in tensors.items()}


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    r"""In this block every parameter is whole in every process, for calls other than the training's.

    Memory: the whole model in each process.
    """
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()


def full(x: Tensor) -> Tensor:
    r"""Put one shared tensor together; give any other as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x

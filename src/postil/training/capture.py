r"""What a training must remember besides its weights, taken apart into tensors and JSON.

To go on as if nothing had happened, the optimizer's running moments and every random generator must come
back bit by bit. The functions here take them apart into the two kinds of value that a checkpoint holds, and
put them together again. A resumed run repeats the straight one exactly only under equal conditions, since
the order of floating-point sums depends on them; `conditions` names these, `differences` compares them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from postil.training.tensor_files import plain_names

__all__ = [
    "conditions",
    "differences",
    "optimizer_state",
    "random_state",
    "restore_optimizer",
    "restore_random",
    "unwrapped",
]


# A name that a wrapper changed would tie the checkpoint to the wrapper, so state is taken from, and given
# to, the module inside.
def unwrapped(module: nn.Module) -> nn.Module:
    r"""Return the module inside `torch.compile`, Fabric and `DistributedDataParallel`."""
    while True:
        inner = getattr(module, "_orig_mod", None) or getattr(module, "_forward_module", None)
        if inner is None and isinstance(module, DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


# PyTorch files an optimizer's state by the position of each parameter, so one parameter more, or another
# order of the groups, hands every later parameter the moments of its neighbour. Names do not move.
def optimizer_state(
    optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    r"""Take an optimizer apart: tensors as `<parameter>.<slot>`, and what JSON can hold.

    `named` is `model.named_parameters()`. The JSON part lists, for each parameter group, its options
    and the names of its parameters.

    Raises:
        ValueError: if the optimizer has a parameter that `named` lacks.
    """
    names = _names_by_group(optimizer, named)
    order = [name for group in names for name in group]
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, slots in state["state"].items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                tensors[f"{order[index]}.{slot}"] = value
            else:
                values.setdefault(order[index], {})[slot] = value
    groups = [
        {"names": group, "options": {key: _plain(value) for key, value in options.items() if key != "params"}}
        for group, options in zip(names, state["param_groups"], strict=True)
    ]
    return tensors, {"groups": groups, "values": values}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _names_by_group(optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> list[list[str]]:
    named = list(named)
    plain = plain_names(name for name, _ in named)
    by_identity = {id(parameter): plain[name] for name, parameter in named}
    try:
        return [[by_identity[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise ValueError("the optimizer has a parameter that the model does not") from None


def restore_optimizer(
    optimizer: Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    r"""Put back what `optimizer_state` took apart, by name, in whatever order the parameters stand now.

    Raises:
        ValueError: naming the parameters that only one side has, or that are grouped otherwise.
    """
    names = _names_by_group(optimizer, named)
    saved = {frozenset(group["names"]): group["options"] for group in values["groups"]}
    different = {frozenset(group) for group in names} ^ set(saved)
    if different:
        first = sorted(set().union(*different))[:3]
        raise ValueError(f"the optimizer's groups of parameters differ from the saved ones, first at {first}")
    slots: dict[str, dict[str, Any]] = {name: dict(rest) for name, rest in values["values"].items()}
    for key, tensor in tensors.items():
        name, _, slot = key.rpartition(".")
        slots.setdefault(name, {})[slot] = tensor
    current = optimizer.state_dict()
    groups = [
        {**group, **{key: _like(group.get(key), value) for key, value in saved[frozenset(of)].items()}}
        for group, of in zip(current["param_groups"], names, strict=True)
    ]
    order = [name for group in names for name in group]
    unknown = sorted(set(slots) - set(order))
    if unknown:
        raise ValueError(f"saved optimizer state of {unknown[:3]}, which the model does not have")
    state = {index: slots[name] for index, name in enumerate(order) if name in slots}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


# JSON has lists for tuples, and a learning rate that was a tensor (for CUDA graphs) came back a number.
def _like(current: Any, saved: Any) -> Any:
    if isinstance(current, tuple):
        return tuple(saved)
    return torch.as_tensor(saved).to(current) if isinstance(current, Tensor) else saved


# Every generator that training draws from, the global ones of PyTorch, numpy and Python included: a library
# in between may draw from any of them, and one missing is enough for another dropout mask.
def random_state(
    generators: Mapping[str, torch.Generator] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    r"""Take the state of all global random generators, and of `generators`, as tensors and JSON."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    tensors |= {f"generator.{name}": each.get_state() for name, each in (generators or {}).items()}
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    values = {
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(words), next_gauss],
    }
    return tensors, values


def restore_random(
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    generators: Mapping[str, torch.Generator] | None = None,
) -> None:
    r"""Put back what `random_state` took.

    States of GPUs that this machine does not have are left out; `differences` reports the other device.

    Raises:
        ValueError: if one of `generators` was not saved.
    """
    missing = [name for name in generators or {} if f"generator.{name}" not in tensors]
    if missing:
        raise ValueError(f"no saved state of the random generators {missing}")
    torch.set_rng_state(tensors["torch"])
    for index in range(torch.cuda.device_count()):
        if (state := tensors.get(f"cuda.{index}")) is not None:
            torch.cuda.set_rng_state(state, index)
    for name, generator in (generators or {}).items():
        generator.set_state(tensors[f"generator.{name}"])
    kind, keys, *rest = values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, words, next_gauss = values["python"]
    random.setstate((version, tuple(words), next_gauss))


def conditions(device: torch.device | str = "cpu") -> dict[str, Any]:
    r"""Return what must be equal for a resumed run to be bit-identical to an uninterrupted one."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    device = torch.device(device)
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "world_size": torch.distributed.get_world_size() if distributed else 1,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    r"""Return one line for each condition that differs; empty if a resume will be bit-identical."""
    return [
        f"{name}: {saved[name]!r} when saved, {now[name]!r} now"
        for name in now
        if name in saved and saved[name] != now[name]
    ]

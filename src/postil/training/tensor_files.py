r"""One group of named tensors as one safetensors file.

The format holds each tensor once, contiguous and by name, and nothing but tensors. What it cannot say,
that two names are one tensor, is given back as a small dictionary for the manifest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

__all__ = ["parse", "plain_names", "size_and_digest", "write"]

_WRAPPERS = {"_orig_mod", "_forward_module"}


def write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    r"""Write a new file at `path`; return which names were left out, and the name each is an alias of.

    Raises:
        OSError, SafetensorError: if it cannot be written.
        ValueError: if two names become one without their prefixes, or a tensor is not dense.
    """
    stored, tied = _stored(tensors)
    safetensors.torch.save_file(stored, path)
    return tied


# Tied weights are one tensor under two names. Stored twice, they would come back as two tensors that
# drift apart from the next update on, and double the size of a small model's file.
def _stored(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    names = plain_names(tensors)
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        same = (tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() > 0 and first.setdefault(same, names[name]) != names[name]:
            tied[names[name]] = first[same]
        else:
            stored[names[name]] = tensor.detach()
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in stored.values())
    return {name: _alone(tensor, users) for name, tensor in stored.items()}, tied


# The library refuses tensors that share storage. Two slices of one buffer are two values here, so each
# that does not fill its storage alone is copied.
def _alone(tensor: Tensor, users: Counter[int]) -> Tensor:
    storage = tensor.untyped_storage()
    shared = users[storage.data_ptr()] > 1 or storage.nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()


# `torch.compile` and Fabric put a component into every name, wherever the wrapped module stands; no module
# of a model is called so. Data parallelism wraps the whole model in `module`, which a model may well use
# for a part of itself: it goes only where all names begin with it.
def plain_names(names: Iterable[str]) -> dict[str, str]:
    r"""Map names to names without the prefixes of wrappers.

    Raises:
        ValueError: if two names would become one.
    """
    plain = {name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names}
    while plain and all(name.startswith("module.") for name in plain.values()):
        plain = {name: short.removeprefix("module.") for name, short in plain.items()}
    if len(set(plain.values())) < len(plain):
        double = sorted({short for short in plain.values() if list(plain.values()).count(short) > 1})
        raise ValueError(f"without the prefixes of wrappers, several tensors are called {double}")
    return plain


def size_and_digest(path: Path) -> tuple[int, str]:
    r"""Return the size of a file in bytes and its SHA-256, reading it piece by piece.

    Raises:
        OSError: if it cannot be read.
    """
    size, digest = 0, hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(2**20):
            size += len(piece)
            digest.update(piece)
    return size, digest.hexdigest()


# Parsed from the very bytes whose digest was taken, so nobody can exchange the file in between. The
# library checks header length, offsets, shapes and element sizes against these bytes before it makes the
# first tensor: a header that promises a terabyte allocates nothing.
def parse(data: bytes) -> dict[str, Tensor]:
    r"""Return the tensors that the bytes of a safetensors file hold.

    Raises:
        Exception: of several kinds, if the bytes are not such a file.
    """
    return safetensors.torch.load(data)

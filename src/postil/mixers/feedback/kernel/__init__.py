r"""The compiled form: how the kernel is built, loaded and called.

`feedback.cpp` beside this page computes the same recurrence as the plain form, on the same tensors, in single
precision. It is compiled on the machine that runs it, the first time it is needed, for exactly this
processor, and kept in the user's cache. It needs a C++ compiler and nothing else: no headers of PyTorch, so
the build takes seconds and survives a new PyTorch.

Where there is no compiler, or a model is of a kind the kernel was not written for, the plain form computes
it. Nobody is left to guess: `kernel_status` says which, and a failed build warns.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from postil.mixers.feedback import plain
from postil.mixers.feedback.backward import memory_weights, start_debts
from postil.mixers.feedback.plain import CHUNK, Problem, Tape, room
from postil.mixers.feedback.recurrence import FoldedWeights

__all__ = ["available", "backward", "blank_tape", "fits", "forward", "kernel_status", "step"]

SOURCES = (
    *("feedback.cpp", "backward.h", "attention.h", "step.h", "problem.h", "products.h"),
    *("pages.h", "vectors.h"),
)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
LANES = 16
PAGES_FROM = 1 << 18

# ## The call
#
# One structure carries everything; its fields are those of `problem.h`, in the same order.
# fmt: off
SIZES = (
    "T", "B", "D", "F", "L", "H", "E", "G", "carried", "R", "window", "norm_memory", "mask_rows",
    "mask_batch", "threads",
)
POINTERS = (
    "allowed", "x", "query", "query_bias", "positions", "position_bias", "output", "output_bias",
    "layer1", "layer1_bias", "layer2", "layer2_bias", "mixing", "key_value", "key_value_bias",
    "y", "keys", "values", "inputs", "middles", "hidden", "attended", "queries", "probabilities",
    "mixed", "mixed_rstd", "dy", "dkeys", "dvalues", "dx", "dmixed", "dkey_value",
)
GRADIENTS = (
    "dquery", "dquery_bias", "dpositions", "dposition_bias", "doutput", "doutput_bias",
    "dlayer1", "dlayer1_bias", "dlayer2", "dlayer2_bias",
)
# fmt: on


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_void_p) for name in POINTERS + GRADIENTS),
    ]


def _call(function: str, p: Problem, **tensors: Tensor | None) -> None:
    (length, batch, width), (layers, hidden) = p.x.shape, p.weights.layer1.shape[:2]
    groups, heads, _, carried, head_width = p.keys.shape
    # The structure holds addresses; the tensors must outlive the call.
    held = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    held |= {name: tensor.contiguous() for name, tensor in p.weights._asdict().items()}
    held["x"] = p.x.contiguous()
    rows, columns = 1, 1
    if p.allowed is not None:
        held["allowed"] = p.allowed.contiguous()
        rows, _, columns = p.allowed.shape
    call = _Call(
        T=length,
        B=batch,
        D=width,
        F=hidden,
        L=layers,
        H=heads,
        E=head_width,
        G=groups,
        carried=carried,
        R=p.weights.positions.shape[2],
        window=p.window,
        norm_memory=p.norm_memory,
        mask_rows=rows,
        mask_batch=columns,
        threads=torch.get_num_threads(),
        **{name: tensor.data_ptr() for name, tensor in held.items() if tensor.numel()},
    )
    getattr(_library(), function)(ctypes.byref(call))


def fits(p: Problem) -> bool:
    r"""Say whether the kernel computes this: float32 on the CPU, no dropout, widths in multiples of 16.

    The first problem that fits makes the kernel be built.
    """
    sizes = (p.x.shape[2], p.weights.layer1.shape[1], p.keys.shape[-1])
    return (
        p.x.device.type == "cpu"
        and p.x.dtype == torch.float32
        and not p.noise
        and p.x.numel() > 0
        and all(size % LANES == 0 for size in sizes)
        and isinstance(_library(), ctypes.CDLL)
    )


# The kernel's rows of probabilities are packed closer than a table's (`problem.h`). What the table has too
# much is never written to, and memory that is never written to takes no place.
def blank_tape(p: Problem, new: Callable[..., Tensor]) -> Tape:
    r"""Make room for what the kernel's forward leaves, by `new`."""
    span = p.carried + p.x.shape[0]
    columns = span + 2 * CHUNK if p.window >= span else p.window + 4 * CHUNK
    return plain.blank_tape(p, new, columns)


# Large tables lie on large pages, which stay with the process when their tensor goes (`pages.h`).
def _pages(*size: int) -> Tensor:
    count = math.prod(size)
    if count < PAGES_FROM:
        return torch.empty(size)
    library = _library()
    assert isinstance(library, ctypes.CDLL)
    address = library.feedback_take(count)
    if not address:
        raise MemoryError(f"no room for a table of {4 * count} bytes")
    table = (ctypes.c_float * count).from_address(address)
    weakref.finalize(table, library.feedback_give, ctypes.c_void_p(address)).atexit = False
    return torch.frombuffer(table, dtype=torch.float32).view(size)


def forward(p: Problem) -> tuple[Tensor, Tensor, Tensor, Tape]:
    r"""Compute what `plain.forward` computes."""
    keys, values = room(p.keys, len(p.x)), room(p.values, len(p.x))
    tape, outputs = blank_tape(p, _pages), p.x.new_empty(p.x.shape)
    _call("feedback_forward", p, y=outputs, keys=keys, values=values, **tape._asdict())
    return outputs, keys, values, tape


def backward(
    p: Problem,
    tape: Tape,
    outputs: Tensor,
    memory: tuple[Tensor, Tensor],
    grad: Tensor,
    grad_memory: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, FoldedWeights]:
    r"""Compute what the plain backward computes."""
    debts, dw, dx = start_debts(p, tape, grad_memory)
    _call(
        "feedback_backward",
        p,
        keys=memory[0],
        values=memory[1],
        dy=grad,
        dkeys=debts.keys,
        dvalues=debts.values,
        dx=dx,
        dmixed=debts.mixed,
        dkey_value=debts.key_value,
        **tape._asdict(),
        **{f"d{name}": tensor for name, tensor in dw._asdict().items() if f"d{name}" in GRADIENTS},
    )
    memory_weights(tape, outputs, debts, dw)
    return dx, debts.keys[:, :, :, : p.carried], debts.values[:, :, :, : p.carried], dw


# ## One position
#
# Decoding does not pack the weights; it is given the address of each where it lies, anew for every step, so
# that a model may change between steps as it likes.
STEP_SIZES = (
    "B", "D", "F", "L", "H", "E", "G", "S", "positions", "at_position", "at_row", "at_group", "at_head",
)  # fmt: skip
STEP_POINTERS = (
    "layers", "projections", "real", "x", "keys", "values", "mixing", "memory_gain", "memory_shift",
    "final_gain", "final_shift", "y", "new_keys", "new_values",
)  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in STEP_SIZES),
        *((name, ctypes.c_void_p) for name in STEP_POINTERS),
    ]


def available() -> bool:
    r"""Say whether the kernel is there; build it if it can be built."""
    return isinstance(_library(), ctypes.CDLL)


def _addresses(rows: Sequence[Sequence[Tensor | None]]) -> ctypes.Array[ctypes.c_void_p]:
    found = [None if t is None else t.data_ptr() for row in rows for t in row]
    return (ctypes.c_void_p * len(found))(*found)


def step(
    x: Tensor,
    memory: tuple[Tensor, Tensor, Tensor | None],
    layers: Sequence[Sequence[Tensor]],
    projections: Sequence[Sequence[Tensor | None]],
    norms: Mapping[str, Tensor],
    mixing: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute one position: its output, and its keys and values `[B, G, H, E]`.

    `layers` and `projections` list the parameters in the order of `step.h`; `norms` are the last layer norm
    and, if there is one, the memory's.
    """
    keys, values, real = memory
    (batch, width), (count, _, groups, heads, head_width) = x.shape, keys.shape
    if values.stride() != keys.stride():
        values = values.contiguous()
        keys = keys.contiguous()
    made = [x.new_empty(batch, width), *(x.new_empty(keys.shape[1:]) for _ in range(2))]
    held = {"x": x.contiguous(), "mixing": mixing, "keys": keys, "values": values, **norms}
    held |= dict(zip(("y", "new_keys", "new_values"), made, strict=True))
    if real is not None:
        held["real"] = real.contiguous()
    tables = _addresses(layers), _addresses(projections)
    addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
    addresses |= {"layers": ctypes.addressof(tables[0]), "projections": ctypes.addressof(tables[1])}
    at_position, at_row, at_group, at_head, _ = keys.stride()
    call = _Step(
        B=batch,
        D=width,
        F=layers[0][10].shape[0],
        L=len(layers),
        H=heads,
        E=head_width,
        G=groups,
        S=count,
        positions=layers[0][4].shape[0],
        at_position=at_position,
        at_row=at_row,
        at_group=at_group,
        at_head=at_head,
        **addresses,
    )
    _library().feedback_step(ctypes.byref(call))  # type: ignore[union-attr]
    return made[0], made[1], made[2]


# ## The build
#
# `-march=native` compiles for the processor at hand, and a home directory may be shared by machines with
# different ones. So the name of the library says what it was made from: sources, compiler, flags, processor.
_lock = threading.Lock()


def kernel_status() -> str:
    r"""Say in a line whether the compiled form is there, or why not; build it if it can be built."""
    library = _library()
    if isinstance(library, ctypes.CDLL):
        return f"Feedback Transformer: compiled kernel, {library._name}"
    return f"Feedback Transformer: plain PyTorch form, 2 to 3 times slower than the compiled one: {library}"


def _library() -> ctypes.CDLL | str:
    with _lock:
        return _load()


@cache
def _load() -> ctypes.CDLL | str:
    try:
        library = ctypes.CDLL(str(_build()))
        library.feedback_take.argtypes = [ctypes.c_int64]
        library.feedback_take.restype = ctypes.c_void_p
        return library
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        reason = reason.strip().splitlines()[0] if reason.strip() else type(error).__name__
        warnings.warn(
            f"the compiled kernel of the Feedback Transformer is not available ({reason}); the plain form "
            f"computes the same, 2 to 3 times slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return reason


def _build() -> Path:
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C++ compiler found: install g++ or clang++")
    folder = Path(__file__).parent
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60)
    made_from = [compiler, version.stdout, *FLAGS, platform.machine(), _processor()]
    made_from += [(folder / source).read_text(encoding="utf-8") for source in SOURCES]
    name = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
    library = _cache_folder() / f"feedback-{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and renamed: whoever looks meanwhile sees all of it or nothing.
        with tempfile.TemporaryDirectory(dir=library.parent) as work:
            made = Path(work) / "feedback.so"
            command = [compiler, *FLAGS, str(folder / SOURCES[0]), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            made.replace(library)
    return library


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = ("model name", "flags", "Features")
    found = [next((line for line in lines if line.startswith(name)), "") for name in names]
    return "\n".join([platform.processor(), torch.backends.cpu.get_cpu_capability(), *found])


def _cache_folder() -> Path:
    chosen = os.environ.get("POSTIL_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(chosen) if chosen else Path(home) / "postil") / "kernels"

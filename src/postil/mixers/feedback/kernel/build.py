r"""Building the kernel: on the machine that runs it, when it is first needed.

A C++ compiler is all it takes, no headers of PyTorch, so the build takes seconds and survives a new PyTorch.
The library stays in the user's cache. Where there is no compiler the plain form computes the same, and nobody
is left to guess: a failed build warns, and `kernel_status` says which form computes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path

import torch

__all__ = ["available", "kernel_status", "library"]

SOURCES = (
    *("feedback.cpp", "backward.h", "attention.h", "step.h", "problem.h", "products.h"),
    *("pages.h", "vectors.h"),
)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-shared", "-fPIC", "-pthread")

# `-march=native` compiles for the processor at hand, and a home directory may be shared by machines with
# different ones. So the name of the library says what it was made from: sources, compiler, flags, processor.
_lock = threading.Lock()


def available() -> bool:
    r"""Say whether the kernel is there; build it if it can be built."""
    return isinstance(library(), ctypes.CDLL)


def kernel_status() -> str:
    r"""Say in a line whether the compiled form is there, or why not; build it if it can be built."""
    found = library()
    if isinstance(found, ctypes.CDLL):
        return f"Feedback Transformer: compiled kernel, {found._name}"
    return f"Feedback Transformer: plain PyTorch form, 2 to 3 times slower than the compiled one: {found}"


def library() -> ctypes.CDLL | str:
    r"""Give the library, built and loaded once, or the reason why there is none."""
    with _lock:
        return _load()


@cache
def _load() -> ctypes.CDLL | str:
    try:
        loaded = ctypes.CDLL(str(_build()))
        loaded.feedback_take.argtypes = [ctypes.c_int64]
        loaded.feedback_take.restype = ctypes.c_void_p
        return loaded
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
    built = _cache_folder() / f"feedback-{name}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and renamed: whoever looks meanwhile sees all of it or nothing.
        with tempfile.TemporaryDirectory(dir=built.parent) as work:
            made = Path(work) / "feedback.so"
            command = [compiler, *FLAGS, str(folder / SOURCES[0]), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            made.replace(built)
    return built


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

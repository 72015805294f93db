r"""Building kernels: on the machine that runs them, when they are first needed.

A kernel is a page's fast form in C++, called through `ctypes` on plain addresses. A compiler is all it
takes, no headers of PyTorch, so the build takes seconds and survives a new PyTorch. The library stays in the
user's cache. Where there is no compiler the plain form computes the same, but slower, and nobody is left to
guess: a failed build warns, and `status` says which form computes.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["LANES", "Kernel", "call_structure"]

LANES = 16
"""Numbers that `vectors.h` takes together."""

SHARED = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-shared", "-fPIC", "-pthread")


# `-march=native` compiles for the processor at hand, and a home directory may be shared by machines with
# different ones. So the name of the library says what it was made from: sources, compiler, flags, processor.
@dataclass(eq=False)
class Kernel:
    r"""The C++ of one page: the model it serves, and its sources, of which the first includes the others.

    `slower` says how much slower the plain form is, in words.
    `signatures` gives arguments and result of functions that `call` does not run.
    """

    of: str
    slower: str
    sources: Sequence[Path]
    signatures: Mapping[str, tuple[list[Any], Any]] = field(default_factory=dict)
    _found: ctypes.CDLL | str | None = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def available(self) -> bool:
        r"""Say whether the kernel is there; build it if it can be built."""
        return isinstance(self.library(), ctypes.CDLL)

    def status(self) -> str:
        r"""Say in a line whether the compiled form is there, or why not; build it if it can be built."""
        found = self.library()
        if isinstance(found, ctypes.CDLL):
            return f"{self.of}: compiled kernel, {found._name}"
        return f"{self.of}: plain PyTorch form, {self.slower} than the compiled one: {found}"

    def library(self) -> ctypes.CDLL | str:
        r"""Give the library, built and loaded once, or the reason why there is none."""
        with self._lock:
            if self._found is None:
                self._found = self._load()
            return self._found

    def call(self, function: str, structure: ctypes.Structure) -> None:
        r"""Run a function of the library on a structure; other Python threads go on meanwhile."""
        getattr(self.library(), function)(ctypes.byref(structure))

    def _load(self) -> ctypes.CDLL | str:
        try:
            loaded = ctypes.CDLL(str(_build(self.sources)))
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            reason = reason.strip().splitlines()[0] if reason.strip() else type(error).__name__
            warnings.warn(
                f"the compiled kernel of the {self.of} is not available ({reason}); the plain form computes "
                f"the same, {self.slower}",
                RuntimeWarning,
                stacklevel=2,
            )
            return reason
        for name, (takes, gives) in self.signatures.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = takes, gives
        return loaded


def _build(sources: Sequence[Path]) -> Path:
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C++ compiler found: install g++ or clang++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60)
    made_from = [compiler, version.stdout, *FLAGS, platform.machine(), _processor()]
    made_from += [source.read_text(encoding="utf-8") for source in (*sources, *sorted(SHARED.glob("*.h")))]
    name = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
    built = _cache_folder() / f"{sources[0].stem}-{name}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and renamed: whoever looks meanwhile sees all of it or nothing.
        with tempfile.TemporaryDirectory(dir=built.parent) as work:
            made = Path(work) / built.name
            command = [compiler, *FLAGS, f"-I{SHARED}", str(sources[0]), "-o", str(made)]
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


# ## A call
#
# One structure carries everything, sizes first; its fields are those of the structure that the kernel
# declares, in the same order.
def call_structure(sizes: Sequence[str], pointers: Sequence[str]) -> type[ctypes.Structure]:
    r"""Describe a structure of whole numbers of eight bytes and addresses, by their names."""
    fields = [*((name, ctypes.c_int64) for name in sizes), *((name, ctypes.c_void_p) for name in pointers)]
    return type("Call", (ctypes.Structure,), {"_fields_": fields})

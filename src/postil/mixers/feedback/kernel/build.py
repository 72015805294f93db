r"""What the kernel is made of."""

from __future__ import annotations

import ctypes
from pathlib import Path

from postil.kernels import Kernel

__all__ = ["KERNEL"]

FILES = ("feedback.cpp", "backward.h", "attention.h", "step.h", "problem.h", "products.h", "pages.h")

KERNEL = Kernel(
    of="Feedback Transformer",
    slower="2 to 4 times slower",
    sources=[Path(__file__).parent / name for name in FILES],
    signatures={"feedback_take": ([ctypes.c_int64], ctypes.c_void_p)},
)
"""The library, built and loaded when it is first asked for."""

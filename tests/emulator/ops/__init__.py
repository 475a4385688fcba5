"""The ops as the emulator runs them: CPU tensors in and out, the CUDA kernels in between.

Each function does what its op's .cu does around the kernels: contiguous inputs, outputs, workspace, launch. Every module here
says in KERNELS which ops it runs; KERNELS of this package holds them all.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

KERNELS: dict[str, Callable] = {}
for module in iter_modules(__path__, f"{__name__}."):
    KERNELS |= getattr(import_module(module.name), "KERNELS", {})

"""The ops as the emulator runs them: CPU tensors in and out, csrc/cuda/*.cu in between; attention.py has its own launches."""

from emulator.ops import attention
from emulator.ops.launching import emulated
from pass_ext import _library

KERNELS = {name: emulated(name) for name in _library.op_names() if name not in _library.CPU_ONLY} | attention.KERNELS

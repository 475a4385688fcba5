"""The ops as the emulator runs them: CPU tensors in and out, the CUDA kernels in between.

Each function does what the op's .cu does around the kernels: contiguous inputs, outputs, workspace, launch.
"""

from emulator.ops import attention, cache, lookahead, sampling, tree

KERNELS = lookahead.KERNELS | tree.KERNELS | attention.KERNELS | sampling.KERNELS | cache.KERNELS

"""Cycles of each event of tests/emulator/critical_path.h: they decide which of a launch's paths is the longest, no more.

About what Hopper takes: loads by github.com/markdewing/AI_kernels (latency, GH200), products and shared memory by
arXiv:2402.13499, the rest assumed.
"""

CYCLES = {
    "instruction": 2.8,
    "memory_load": 1045.0,
    "l2_load": 409.0,
    "l1_load": 40.0,
    "shared_load": 28.0,
    "shared_atomic": 57.0,
    "warp_operation": 26.0,
    "block_barrier": 35.0,
    "fence": 578.0,
    "atomic": 409.0,
    "matrix_product": 23.0,
}

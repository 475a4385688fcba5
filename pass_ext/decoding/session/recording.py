"""``record_graph``: a function's kernels as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def record_graph(function: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Records what ``function`` launches, and runs none of it -> the graph, and what the function returned.

    Garbage is kept meanwhile: freeing another graph would end the recording. Other threads may call CUDA.

    Raises:
        RuntimeError: the function does what a graph cannot hold, such as waiting for the device.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function()
    finally:
        if collects:
            gc.enable()
    return graph, result

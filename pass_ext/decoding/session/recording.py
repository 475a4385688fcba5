"""``record_graph``: a function's kernels as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_recording = Lock()  # torch allows one recording in a process, and the collector's switch is the process's


def record_graph(function: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Records what ``function`` launches on ``device``, and runs none of it -> the graph, and what the function returned.

    Garbage is kept meanwhile: freeing another graph would end the recording. Other threads may call CUDA.

    Raises:
        RuntimeError: the function does what a graph cannot hold, such as waiting for the device.
    """
    with _recording, torch.cuda.device(device):
        graph, collects, before = torch.cuda.CUDAGraph(), gc.isenabled(), torch.cuda.current_stream()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=_stream_of(device), capture_error_mode="thread_local"):
                result = function()
        finally:
            torch.cuda.set_stream(before)  # torch leaves its own stream current if a recording fails
            if collects:
                gc.enable()
    return graph, result


@cache  # one for each device: libraries keep a workspace for every stream
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

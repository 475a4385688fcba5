"""``record_graph``: a function's kernels as a CUDA graph; a device step records itself whole. ``RecordedCalls``: a session's
calls as graphs, one per shape of a step, recorded at the second call of that shape.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from pass_ext.decoding.models.packed import Adapted, NewRows
from pass_ext.decoding.models.step_states import Update
from pass_ext.tree import PackedTrees

T = TypeVar("T")


def can_record(device: torch.device) -> bool:
    """Whether its launches can become a graph."""
    return device.type == "cuda"


_recording = Lock()  # torch allows one recording in a process, and the collector's switch is the process's


def record_graph(function: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Records the launches of ``function`` on ``device``, and runs none of them -> the graph, and the function's result.

    Garbage is kept meanwhile: freeing another graph would end the recording. Other threads may call CUDA.

    Raises:
        RuntimeError: a graph cannot hold the function, which waits for the device, say.
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


Called = tuple[Tensor, NewRows, list[Update], Tensor | None]
"""Logits, keys and values of all layers, the updates of all states, and hidden states where they are wanted."""
Forward = Callable[[PackedTrees, Tensor], Called]


@dataclass
class _Recording:
    """A replay reads the step from fixed buffers (ids, depths, bits, bounds, what lies beside them; the session's lengths,
    caches and states) and writes its results to fixed buffers."""

    graph: torch.cuda.CUDAGraph
    trees: PackedTrees
    ids: Tensor
    beside: tuple[Tensor, ...]
    called: Called
    left: tuple[Tensor, ...]

    def replay(self, trees: PackedTrees, ids: Tensor, model: Adapted) -> Called:
        self.ids.copy_(ids)
        for copied, given in zip(self.beside, model.beside, strict=True):
            copied.copy_(given)
        for buffer, value in zip(self.trees, trees, strict=True):
            if isinstance(buffer, Tensor) and isinstance(value, Tensor):
                buffer.copy_(value)
        self.graph.replay()
        model.left = self.left
        return self.called


class RecordedCalls:
    """Runs, records or replays ``forward(trees, ids)``."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._seen: set[Hashable] = set()
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    def __call__(self, trees: PackedTrees, ids: Tensor, model: Adapted) -> Called:
        """Calls ``forward``, which calls this model. The next replay of the same shape overwrites the result."""
        shapes = trees.visible.shape, trees.cu_nodes.shape, *(x.shape for x in model.beside)
        shape = len(ids), trees.max_nodes, shapes
        if shape in self._recordings:
            return self._recordings[shape].replay(trees, ids, model)
        if shape not in self._seen:  # a first call outside of a graph: kernels load, libraries allocate
            self._seen.add(shape)
            return self._forward(trees, ids)
        parents, cu_nodes, most, visible, depths = trees
        buffers = PackedTrees(parents.clone(), cu_nodes.clone(), most, visible.clone(), depths.clone())
        copied, given = ids.clone(), model.beside
        beside = model.beside = tuple(x.clone() for x in given)
        graph, called = record_graph(lambda: self._forward(buffers, copied), ids.device, self._pool)
        self._pool, model.beside = graph.pool(), given
        self._recordings[shape] = _Recording(graph, buffers, copied, beside, called, model.left)
        return self._recordings[shape].replay(trees, ids, model)

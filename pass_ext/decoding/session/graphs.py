"""``RecordedCalls``: a session's calls as CUDA graphs, one per shape of a step, recorded at the second call of that shape.

A replay reads the step from fixed buffers (ids, depths, bits, bounds; the session's lengths and caches) and writes logits, keys
and values to fixed buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.session.recording import record_graph
from pass_ext.decoding.session.step_attention import NewRows
from pass_ext.tree import PackedTrees

Forward = Callable[[PackedTrees, Tensor], tuple[Tensor, NewRows]]


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    trees: PackedTrees
    ids: Tensor
    logits: Tensor
    new: NewRows

    def replay(self, trees: PackedTrees, ids: Tensor) -> tuple[Tensor, NewRows]:
        self.ids.copy_(ids)
        for buffer, value in zip(self.trees, trees, strict=True):
            if isinstance(buffer, Tensor) and isinstance(value, Tensor):
                buffer.copy_(value)
        self.graph.replay()
        return self.logits, self.new


class RecordedCalls:
    """Runs, records or replays ``forward(trees, ids)``, which returns logits and the keys and values of all layers."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._seen: set[tuple[int, ...]] = set()
        self._recordings: dict[tuple[int, ...], _Recording] = {}
        self._pool: Any = None

    def __call__(self, trees: PackedTrees, ids: Tensor) -> tuple[Tensor, NewRows]:
        """Calls ``forward``. The next replay of the same shape overwrites the result."""
        shape = (len(ids), trees.max_nodes, *trees.visible.shape, len(trees.cu_nodes))
        if shape in self._recordings:
            return self._recordings[shape].replay(trees, ids)
        if shape not in self._seen:  # a first call outside of a graph: kernels load, libraries allocate
            self._seen.add(shape)
            return self._forward(trees, ids)
        recording = self._record(trees, ids)
        self._recordings[shape] = recording
        return recording.replay(trees, ids)

    def _record(self, trees: PackedTrees, ids: Tensor) -> _Recording:
        parents, cu_nodes, most, visible, depths = trees
        buffers = PackedTrees(parents.clone(), cu_nodes.clone(), most, visible.clone(), depths.clone())
        ids = ids.clone()
        graph, (logits, new) = record_graph(lambda: self._forward(buffers, ids), ids.device, self._pool)
        self._pool = graph.pool()
        return _Recording(graph, buffers, ids, logits, new)

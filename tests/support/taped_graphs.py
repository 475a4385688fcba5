"""CUDA graphs without CUDA: a recording keeps the ops of a call, and a replay runs them again on the same tensors.

    a graph holds    ops with fixed arguments and memory: Python runs once, and nothing is read back
    a replay         each op again, its result copied over that of the recording

So a call that reads a tensor other than its buffers, or leaves a result elsewhere, gives what it gave when it was recorded.
Not seen: memory that a graph's pool gives to another graph.
"""

import torch
from support.generation import NoHostReads
from torch.utils._pytree import tree_leaves

from pass_ext.decoding.session import recording, session


class TapedGraph(NoHostReads):
    """Records inside ``with``, and fails where a CUDA graph would: at a result that the host waits for."""

    replays = 0
    """Of all graphs so far."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def pool(self):
        return None

    def replay(self):
        TapedGraph.replays += 1
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def use_taped_graphs(monkeypatch):
    """Has sessions with ``cuda_graphs=True`` record here -> a list that grows by the model of each replayed call."""
    replayed = []

    class Calls(recording.RecordedCalls):
        def __call__(self, trees, ids, model):
            before = TapedGraph.replays
            called = super().__call__(trees, ids, model)
            replayed.extend([model] * (TapedGraph.replays - before))
            return called

    def record(function, device, pool=None):
        with TapedGraph() as graph:
            result = function()
        return graph, result

    monkeypatch.setattr(recording, "record_graph", record)
    monkeypatch.setattr(session, "can_record", lambda device: True)
    monkeypatch.setattr(session, "RecordedCalls", Calls)
    return replayed

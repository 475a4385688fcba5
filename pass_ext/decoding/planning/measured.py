"""``measured_times``: the seconds of a model's calls by their rows, measured once per model and machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from pass_ext.decoding.methods import MAX_PLANNED_ROWS
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.planning.step_times import StepTimes, measure
from pass_ext.decoding.session.session import Session
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.tree import Tree, pack_trees

_times: dict[tuple[Any, ...], StepTimes] = {}
"""Times by model, device, threads, and whether calls are CUDA graphs."""

_PREFIX = 256  # tokens of text before the measured rows


def measured_times(model: Adapted, *, graphs: bool = False, lookahead: LookaheadEmbedding | None = None) -> StepTimes:
    """Seconds of a call by its rows, behind a short prefix; measured once per model and machine, then read from disk.

    lookahead: with adapters, half the rows of a call are slots, so that the times hold the work of these; without, it changes
    no time.

    A callable without a config cannot be recognised in another process, so it is measured once per object.
    """
    if model.logit_shards is not None:
        raise ValueError(
            f"{model.name}: rows must be a number under tensor parallelism, such as PaSS(slots, rows=24), got 'auto': "
            "ranks that measure their own step times would choose different trees"
        )
    adapted = None if lookahead is None or lookahead.adapters is None else lookahead
    fingerprint = _fingerprint(model)
    key = _key(model, fingerprint, graphs, adapted)
    if key in _times:
        return _times[key]
    with torch.no_grad(), model.attached():
        kind = fingerprint and f"{fingerprint}{' in graphs' if graphs else ''}{key[-1]}"
        run = _Calls(model, graphs, adapted).run
        times = measure(run, fingerprint=kind, device=model.table.device)
    if fingerprint is None:
        try:
            finalize(model.model, _times.pop, key, None)
        except TypeError:  # without a finalizer its id may later be another object's
            return times
    _times[key] = times
    return times


def _key(model: Adapted, fingerprint: str | None, graphs: bool, adapted: LookaheadEmbedding | None) -> tuple[Any, ...]:
    """What times belong to; the last entry describes adapters."""
    machine = str(model.table.device), torch.get_num_threads(), graphs
    return fingerprint or id(model.model), *machine, _sizes_text(adapted)


def _sizes_text(adapted: LookaheadEmbedding | None) -> str:
    """The sizes of all adapters, which decide their time."""
    if adapted is None or adapted.adapters is None:
        return ""
    known = sorted(adapted.adapters.sizes.items()), adapted.adapters.count, adapted.num_lookahead
    return f" with adapters {hashlib.sha256(str(known).encode()).hexdigest()}"


class _Calls:
    """Calls with any number of rows behind one prefix. The first call reads the prefix.

    adapted: look-ahead embeddings with adapters, whose slots are the second half of the rows; None: no row is a slot's.
    """

    def __init__(self, model: Adapted, graphs: bool, adapted: LookaheadEmbedding | None = None) -> None:
        self._session = Session(model, 1, _PREFIX + MAX_PLANNED_ROWS, cuda_graphs=graphs)
        self._slots = 0
        if adapted is not None:
            self._slots = adapted.num_lookahead
            self._session.set_slots(adapted, self._slots)

    def run(self, rows: int) -> None:
        session = self._session
        if not session.caches:
            path = torch.arange(_PREFIX, dtype=torch.int32, device=session.device)[None]
            trees = pack_trees([Tree.chain(_PREFIX - 1)], session.device)
            session.call(trees, self._ids(_PREFIX), torch.zeros(1, dtype=torch.int64, device=session.device))
            session.commit(trees, path, torch.full_like(path[:, 0], _PREFIX - 1))
        ids = self._ids(rows)
        if self._slots:
            slots = rows // 2
            ids[rows - slots :] = -1 - torch.arange(slots, device=session.device) % self._slots
        session.call(pack_trees([Tree.chain(rows - 1)], session.device), ids)

    def _ids(self, count: int) -> Tensor:
        return torch.arange(count, device=self._session.device) % self._session.model.table.shape[0]


def _fingerprint(model: Adapted) -> str | None:
    """A hash of everything that a call's time depends on; None for callables without a config."""
    module: Any = model.model
    config: Any = getattr(module, "config", None)
    if not isinstance(module, torch.nn.Module) or not hasattr(config, "to_dict"):
        return None
    described = json.dumps(config.to_dict(), sort_keys=True, default=str)
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return hashlib.sha256(f"{kind} {described} {shapes}".encode()).hexdigest()

"""The plan of PaSS for one model on one machine: calibrated hit rates of the embeddings and measured step times, planned.

Called by ``drafting``, and by people who want to see a plan: ``print(pass_plan(PaSS(...), packed_model(model), 1)[0])``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from pass_ext.decoding.methods import PaSS
from pass_ext.decoding.model import Adapted
from pass_ext.decoding.planner import Plan, assumed_hit_rates, plan, plan_auto
from pass_ext.decoding.session import Session
from pass_ext.decoding.step_times import StepTimes, measure
from pass_ext.tree import Tree, pack_trees

_ASSUMED_RANKS = 16
_times: MutableMapping[Any, dict[int, StepTimes]] = WeakKeyDictionary()  # of models that are alive, by threads
_PREFIX = 256  # tokens that measured steps stand behind


def pass_plan(method: PaSS, model: Adapted, requests: int) -> tuple[Plan, StepTimes | None]:
    """The plan, and the step times that chose it where ``rows`` is "auto"."""
    slots = method.num_slots
    calibrated = method.lookahead.hit_rates
    rates = calibrated[:slots] if calibrated else assumed_hit_rates(slots, _ASSUMED_RANKS)
    times = measured_times(model) if method.rows == "auto" else None
    known = tuple(map(tuple, rates))
    return _planned(known, times, slots, method.tree, method.rows, method.passes, requests), times


@lru_cache(maxsize=64)
def _planned(
    rates: tuple[tuple[float, ...], ...],
    times: StepTimes | None,
    slots: int,
    tree: Tree | None,
    rows: int | str,
    passes: int,
    requests: int,
) -> Plan:
    how: Any = dict(passes=passes, requests=requests)
    if tree is not None:
        most = rows if isinstance(rows, int) else None
        return Plan.from_tree(tree, slots, rates, rows=most, step_time=None if times is None else times.at, **how)
    if times is not None:
        return plan_auto(rates, times, **how)
    assert isinstance(rows, int)
    return plan(rates, rows=rows, **how)


def measured_times(model: Adapted) -> StepTimes:
    """Seconds of a call by its rows, behind a short prefix; measured once per model and machine, then read from disk."""
    known = _times.setdefault(model.model, {})
    threads = torch.get_num_threads()
    if threads not in known:
        known[threads] = _measured(model)
    return known[threads]


def _measured(model: Adapted) -> StepTimes:

    def run(rows: int) -> None:
        session = sessions.setdefault(0, Session(model, 1, _PREFIX + 512))
        if not session.caches:
            ids = torch.arange(_PREFIX, device=session.device) % model.table.shape[0]
            trees = pack_trees([Tree.chain(_PREFIX - 1)], session.device)
            session.call(trees, ids, torch.zeros(1, dtype=torch.int64, device=session.device))
            path = torch.arange(_PREFIX, dtype=torch.int32, device=session.device)[None]
            session.commit(trees, path, torch.full((1,), _PREFIX - 1, dtype=torch.int32, device=session.device))
        ids = torch.arange(rows, device=session.device) % model.table.shape[0]
        session.call(pack_trees([Tree.chain(rows - 1)], session.device), ids)

    sessions: dict[int, Session] = {}
    with torch.no_grad(), model.attached():
        return measure(run, fingerprint=_fingerprint(model), device=model.table.device)


def _fingerprint(model: Adapted) -> str:
    """What the time of a call depends on, of the model."""
    config: Any = getattr(model.model, "config", None)
    described = json.dumps(config.to_dict(), sort_keys=True, default=str) if config is not None else ""
    module = model.model
    shapes = (
        [(name, list(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
        if isinstance(module, torch.nn.Module)
        else [list(model.table.shape), str(model.table.dtype)]
    )
    return hashlib.sha256(f"{type(module).__name__} {described} {shapes}".encode()).hexdigest()

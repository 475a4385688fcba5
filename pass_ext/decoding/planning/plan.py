"""``plan``: the tree that a method would use for a model on this machine, with its expected speed."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

from pass_ext.decoding.methods import MultiCandidate, PaSS, Speculative
from pass_ext.decoding.models.early_exit import packed_model
from pass_ext.decoding.planning.draft_tree import DraftPlan
from pass_ext.decoding.planning.for_draft_model import draft_plan
from pass_ext.decoding.planning.for_lookahead import pass_plan
from pass_ext.decoding.planning.lookahead_tree import Plan


def plan(
    model: Any, method: PaSS | Speculative | MultiCandidate, requests: int = 1, *, temperature: float = 0.0
) -> Plan | DraftPlan:
    """Returns the plan that the method would follow. ``print`` shows it as a table.

    Measures the model's calls if no times are on disk: a few seconds, once per model and machine.

    Args:
        model: a model as ``generate`` takes it.
        method: ``PaSS``, or ``Speculative`` or ``MultiCandidate`` without a tree of its own.
        requests: how many are decoded together. The plan is the best one that is common to all; ``PaSS`` with rows "auto"
            takes the rows of each request anew in each step.
        temperature: of the texts. ``PaSS`` knows how often slots are right in greedy texts, temperature 0, and in others; draft
            models' hit rates are those that were counted.
    """
    if isinstance(requests, bool) or not isinstance(requests, int) or requests < 1:
        raise ValueError(f"plan: requests must be a whole number, 1 or more, got {requests!r}")
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ValueError(f"plan: temperature must be a number, 0 or more, got {temperature!r}")
    return _plan(method, model, requests, temperature)


@singledispatch
def _plan(method: Any, model: Any, requests: int, temperature: float) -> Plan | DraftPlan:
    raise TypeError(
        f"plan: method must be PaSS(...), Speculative(...) or MultiCandidate(...), got {type(method).__name__}"
    )


@_plan.register
def _(method: PaSS, model: Any, requests: int, temperature: float) -> Plan:
    return pass_plan(method, packed_model(model), requests, greedy=temperature == 0)[0]


@_plan.register(Speculative)
@_plan.register(MultiCandidate)
def _(method: Speculative | MultiCandidate, model: Any, requests: int, temperature: float) -> DraftPlan:
    if method.tree is not None:
        raise ValueError(
            f'plan: method must have length="auto" or branching="auto", got a {type(method).__name__} with a tree of its own'
        )
    return draft_plan(method, packed_model(model), packed_model(method.draft_model), requests)

"""``plan``: the tree that a method would use for a model on this machine, with what it promises."""

from __future__ import annotations

from typing import Any

from pass_ext.decoding.methods import MultiCandidate, PaSS, Speculative
from pass_ext.decoding.models.adapt import packed_model
from pass_ext.decoding.planning.draft_tree import DraftPlan
from pass_ext.decoding.planning.for_draft_model import draft_plan
from pass_ext.decoding.planning.for_lookahead import pass_plan
from pass_ext.decoding.planning.lookahead_tree import Plan


def plan(model: Any, method: PaSS | Speculative | MultiCandidate, requests: int = 1) -> Plan | DraftPlan:
    """Returns the plan that the method would follow. ``print`` shows it as a table.

    Measures the model's calls where no times are kept: a few seconds, once per model and machine.

    Args:
        model: what ``generate`` takes.
        method: ``PaSS``, or ``Speculative`` or ``MultiCandidate`` with a tree that is to be planned.
        requests: decoded together.
    """
    if isinstance(requests, bool) or not isinstance(requests, int) or requests < 1:
        raise ValueError(f"plan: requests must be a whole number, 1 or more, got {requests!r}")
    if isinstance(method, PaSS):
        return pass_plan(method, packed_model(model), requests)[0]
    if isinstance(method, (Speculative, MultiCandidate)):
        if (method.tree if isinstance(method, MultiCandidate) else method.length) not in (None, "auto"):
            raise ValueError(
                f'plan: this {type(method).__name__} has a tree already; length="auto" or branching="auto" is planned'
            )
        return draft_plan(method, packed_model(model), packed_model(method.draft_model), requests)
    raise TypeError(
        f"plan: method must be PaSS(...), Speculative(...) or MultiCandidate(...), got {type(method).__name__}"
    )

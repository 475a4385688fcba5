"""The tree that a draft model fills: given, or planned from its hit rates and the measured times of both models' calls."""

from __future__ import annotations

from pass_ext.decoding.methods import MOST_DRAFT_LEVELS, MultiCandidate, Speculative
from pass_ext.decoding.models.early_exit_draft import unwrapped
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.planning.draft_tree import DraftPlan, plan_drafts
from pass_ext.decoding.planning.lookahead_tree import assumed_hit_rates
from pass_ext.decoding.planning.measured import measured_times
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.tree import Tree

_GUESSED_LEVELS, _GUESSED_RANKS, _MOST_PLANNED = 8, 8, 64


def call_times(target: Adapted, draft: Adapted, *, graphs: bool = False) -> tuple[StepTimes, StepTimes]:
    """Measured once: the target's calls and the draft's, of which only those with caches of its own are ever recorded."""
    own = draft.shared_model is not unwrapped(target.model)
    return measured_times(target, graphs=graphs), measured_times(draft, graphs=graphs and own)


def draft_plan(
    method: Speculative | MultiCandidate,
    target: Adapted,
    draft: Adapted,
    requests: int,
    *,
    graphs: bool = False,
    chain: bool = False,
) -> DraftPlan:
    """The tree that is expected to be fastest here; a chain, if it has to be one."""
    rates = method.hit_rates or getattr(method.draft_model, "hit_rates", None)
    times, draft_times = call_times(target, draft, graphs=graphs)
    return plan_drafts(
        rates or assumed_hit_rates(_GUESSED_LEVELS, _GUESSED_RANKS),
        times.at,
        draft_times.at,
        most_rows=max(1, min(_MOST_PLANNED, times.rows[-1] // requests)),
        requests=requests,
        most_levels=MOST_DRAFT_LEVELS,
        ranks=1 if chain or isinstance(method, Speculative) else None,
    )


def given_tree(method: Speculative | MultiCandidate) -> Tree | None:
    """The method's own tree; None: it is to be planned."""
    if isinstance(method, MultiCandidate):
        return method.tree
    return None if method.length == "auto" else Tree.chain(method.length)

"""Plans the tree of a draft model that is expected to be fastest, from its hit rates and the measured times of both models'
calls."""

from __future__ import annotations

from pass_ext.decoding.methods import MAX_DRAFT_LEVELS, MultiCandidate, Speculative
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.decoding.planning.constants import MOST_PLANNED_ROWS
from pass_ext.decoding.planning.draft_tree import DraftPlan, plan_drafts
from pass_ext.decoding.planning.lookahead_tree import assumed_hit_rates
from pass_ext.decoding.planning.measured import measured_times
from pass_ext.decoding.planning.step_times import StepTimes

_GUESSED_LEVELS, _GUESSED_RANKS = 8, 8


def call_times(target: Adapted, draft: Adapted, *, graphs: bool = False) -> tuple[StepTimes, StepTimes]:
    """Step times of the target and of the draft, measured once. Calls of an early-exit draft are never CUDA graphs."""
    has_caches = draft.shared_model is not unwrapped(target.model)
    return measured_times(target, graphs=graphs), measured_times(draft, graphs=graphs and has_caches)


def draft_plan(
    method: Speculative | MultiCandidate,
    target: Adapted,
    draft: Adapted,
    requests: int,
    *,
    graphs: bool = False,
    chain: bool = False,
) -> DraftPlan:
    """Plans the tree that is expected to be fastest for these models on this machine. chain: only chains are allowed."""
    rates = method.hit_rates or getattr(method.draft_model, "hit_rates", None)
    times, draft_times = call_times(target, draft, graphs=graphs)
    return plan_drafts(
        rates or assumed_hit_rates(_GUESSED_LEVELS, _GUESSED_RANKS),
        times.at,
        draft_times.at,
        most_rows=max(1, min(MOST_PLANNED_ROWS, times.rows[-1] // requests)),
        requests=requests,
        most_levels=MAX_DRAFT_LEVELS,
        ranks=1 if chain else method.max_branches,
    )

"""The tree that a draft model fills: given, or planned from its hit rates and the measured times of both models' calls.

Called by ``drafting``.
"""

from __future__ import annotations

from collections.abc import Sequence

from pass_ext.decoding.draft_plan import DraftPlan, plan_drafts
from pass_ext.decoding.longest_branch import LONGEST_BRANCH
from pass_ext.decoding.methods import MOST_DRAFT_LEVELS, MultiCandidate, Speculative
from pass_ext.decoding.model import Adapted, packed_model
from pass_ext.decoding.model_drafter import ModelDrafter
from pass_ext.decoding.pass_plan import measured_times
from pass_ext.decoding.planner import assumed_hit_rates
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.decoding.step_times import StepTimes
from pass_ext.early_exit import unwrapped
from pass_ext.tree import Tree

_WITH_REPLACEMENT = ("rejection_with_replacement", "kseq")
_GUESSED_LEVELS, _GUESSED_RANKS, _MOST_PLANNED = 8, 8, 64


def model_drafter(
    method: Speculative | MultiCandidate,
    target: Adapted,
    sampling: SamplingParams,
    rule: str,
    texts: Sequence[list[int]],
    *,
    graphs: bool,
) -> ModelDrafter | None:
    """What drafts for this batch; None where no drafts are expected to gain anything."""
    if sampling.temperature is not None or rule == LONGEST_BRANCH:
        check_rule(method, rule)
    try:
        draft = packed_model(method.draft_model)
    except TypeError as error:
        raise TypeError(f"{type(method).__name__}: draft_model: {error}") from error
    tree = _given(method)
    if tree is None:
        chain = rule == "block" and sampling.temperature is not None
        plan = draft_plan(method, target, draft, len(texts), graphs=graphs, chain=chain)
        if plan.is_plain and rule != LONGEST_BRANCH:
            return None
        tree = Tree.chain(1) if plan.is_plain else plan.tree
    if rule == "block" and sampling.temperature is not None and len(tree.leaves) != 1:
        raise ValueError("rule 'block' takes chains: give Speculative(...), or MultiCandidate(branching=(1, 1, ...))")
    decision = method.decision if isinstance(method, MultiCandidate) else None
    times = draft_times = None
    if _given(method) is None:
        times, draft_times = call_times(target, draft, graphs=graphs)
    return ModelDrafter(
        draft, target, tree, sampling, rule, texts, decision, times=times, draft_times=draft_times, graphs=graphs
    )


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


def _given(method: Speculative | MultiCandidate) -> Tree | None:
    if isinstance(method, MultiCandidate):
        return method.tree
    return None if method.length == "auto" else Tree.chain(method.length)


def check_rule(method: Speculative | MultiCandidate, rule: str) -> None:
    """Refuses a rule that judges other drafts than this method makes."""
    if isinstance(method, Speculative):
        if rule in (*_WITH_REPLACEMENT, LONGEST_BRANCH):
            raise ValueError(f"rule {rule!r} judges several candidates of one parent: use MultiCandidate")
        return
    if method.replacement != (rule in _WITH_REPLACEMENT) and (method.replacement or rule in _WITH_REPLACEMENT):
        needed = f"one of {', '.join(_WITH_REPLACEMENT)}" if method.replacement else "MultiCandidate(replacement=True)"
        raise ValueError(
            f"rule {rule!r} and replacement={method.replacement} do not go together: how candidates are drawn and how they are "
            f"judged must be the same; use {needed}"
        )
    if rule == LONGEST_BRANCH and not method.target_initialised:
        raise ValueError(
            "rule 'longest_branch' is of target-initialised candidates: MultiCandidate(target_initialised=True)"
        )

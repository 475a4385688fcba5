"""``model_drafter``: makes the drafter of a method that has a draft model; refuses rules that judge other drafts."""

from __future__ import annotations

from collections.abc import Sequence

from pass_ext.decoding.drafting.from_draft_model import ModelDrafter
from pass_ext.decoding.methods import MultiCandidate, Speculative
from pass_ext.decoding.models.adapt import packed_model
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.planning.for_draft_model import call_times, draft_plan, given_tree
from pass_ext.decoding.rules import DECODING_RULES, LONGEST_BRANCH
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.tree import Tree

_WITH_REPLACEMENT = tuple(name for name, rule in DECODING_RULES.items() if rule.drafts == "with")


def model_drafter(
    method: Speculative | MultiCandidate,
    target: Adapted,
    sampling: BatchSampling,
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
    tree = given_tree(method)
    if tree is None:
        chain = DECODING_RULES[rule].chains_only and sampling.temperature is not None
        plan = draft_plan(method, target, draft, len(texts), graphs=graphs, chain=chain)
        if plan.is_plain and rule != LONGEST_BRANCH:
            return None
        tree = Tree.chain(1) if plan.is_plain else plan.tree
    if DECODING_RULES[rule].chains_only and sampling.temperature is not None and len(tree.leaves) != 1:
        raise ValueError(f"rule {rule!r} takes chains: give Speculative(...), or MultiCandidate(branching=(1, 1, ...))")
    decision = method.decision if isinstance(method, MultiCandidate) else None
    times = draft_times = None
    if given_tree(method) is None:
        times, draft_times = call_times(target, draft, graphs=graphs)
    return ModelDrafter(
        draft, target, tree, sampling, rule, texts, decision, times=times, draft_times=draft_times, graphs=graphs
    )


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

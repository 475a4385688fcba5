"""``fixed_plan``: whether a generation may run ahead of the host, and with which rows.

A loop runs ahead if the host decides nothing between two steps: no logits processors, candidates from look-ahead slots alone or
none, no pauses, and the rule "coupled" (or greedy texts, which all rules agree on). Streamers and stopping criteria are called
later, in the same order and with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.drafting.from_lookahead import LookaheadDrafter
from pass_ext.decoding.loop.fixed_step import FixedPlan
from pass_ext.decoding.requests.stateful_processors import Processor
from pass_ext.decoding.rules import LONGEST_BRANCH
from pass_ext.tree import Tree


def fixed_plan(context: DraftContext, drafting: Drafting, processors: Sequence[Processor]) -> FixedPlan | str:
    """The rows of every step; or why the host must read each step before the next, in words that follow "because"."""
    if processors:
        return "logits processors run on the host"
    if context.guides is not None:
        return "a grammar's masks are made on the host"
    if context.target.logit_shards is not None:
        return "the columns of the logits are divided among ranks"
    if context.rule == LONGEST_BRANCH or (context.is_sampled and context.rule != "coupled"):
        return f"rule {context.rule!r} is not 'coupled'"
    if not drafting.drafters:
        return FixedPlan(Tree.chain(0))
    if len(drafting.drafters) > 1 or type(drafting.drafters[0]) is not LookaheadDrafter:
        return "candidates do not come from look-ahead slots alone"
    drafter = drafting.drafters[0]
    if drafter.step_times is not None:
        return "drafting pauses by measured times (PaSS with rows='auto')"
    if 0 not in dict(drafter.groups):
        return "the root has no look-ahead slots in every step"
    return FixedPlan(drafter.tree, drafter.groups, drafter.prompt_slots, drafter.offers)


def runs_ahead(context: DraftContext, plan: FixedPlan | str, chosen: bool | None) -> FixedPlan | None:
    """The plan, if the loop is to run ahead of the host.

    Args:
        plan: of ``fixed_plan``.
        chosen: by the caller: True refuses a generation that cannot; None: where it pays.
    """
    if chosen and isinstance(plan, str):
        raise ValueError(f"generate: run_ahead must be False or None, because {plan}, got True")
    if isinstance(plan, str) or chosen is False:
        return None
    return plan if chosen or _pays(context, plan) else None


def _pays(context: DraftContext, plan: FixedPlan) -> bool:
    """On a GPU always. On the CPU, where nothing overlaps, a step costs less of the host's time, but its rows never change: so
    it pays for one text, and if all of its steps need all rows, because each node has look-ahead slots."""
    if context.device.type == "cuda":
        return True
    return len(context.texts) == 1 and (plan.offers is None or len(plan.groups) == plan.candidates.num_nodes)

"""``device_plan``: whether the device makes the rows of a generation's steps, and by which plan. ``loop_of``: its loop.

The device does if the host decides nothing between two steps: no logits processors, candidates from look-ahead slots alone or
none, and the rule "coupled" (or greedy texts, which all rules agree on). Streamers and stopping criteria are called later, in
the same order and with the same tokens. Pauses of drafting are decided by the host, for one text on the CPU: ``PacedLoop``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.drafting.lookahead.drafter import LookaheadDrafter
from pass_ext.decoding.loop.ahead import AheadLoop
from pass_ext.decoding.loop.chosen_step import ChosenPlan
from pass_ext.decoding.loop.fixed_step import FixedPlan
from pass_ext.decoding.loop.paced import PacedLoop
from pass_ext.decoding.requests.stateful_processors import Processor
from pass_ext.decoding.rules import LONGEST_BRANCH
from pass_ext.tree import Tree


def device_plan(
    context: DraftContext, drafting: Drafting, processors: Sequence[Processor], *, is_synthetic: bool = False
) -> FixedPlan | ChosenPlan | str:
    """The rows of every step, or what they are chosen by; or why the host must read each step before the next, in words that
    follow "because". is_synthetic: True: coins accept, along one fixed path."""
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
    if drafter.shared is not None:
        return "a batch shares rows by measured times (PaSS with rows='auto'), which takes one text on the CPU"
    if drafter.choice is not None and not is_synthetic:
        return ChosenPlan(drafter.choice, drafter.offers)
    if 0 not in dict(drafter.groups):
        return "the root has no look-ahead slots in every step"
    return FixedPlan(drafter.tree, drafter.groups, drafter.prompt_slots, drafter.offers)


def loop_of(
    context: DraftContext, drafting: Drafting, plan: FixedPlan | ChosenPlan | str, chosen: bool | None
) -> Callable[..., AheadLoop] | None:
    """The loop whose steps are of the plan; None: the one that waits.

    Args:
        plan: of ``device_plan``.
        chosen: by the caller: True refuses a generation that cannot; None: where it pays.
    """
    on_cpu = context.device.type == "cpu"
    is_paced = on_cpu and len(context.texts) == 1 and bool(drafting.drafters)
    if drafting.pauses is not None and not isinstance(plan, str) and not is_paced:
        plan = "drafting pauses by measured times (PaSS with rows='auto'), which takes one text on the CPU"
    if chosen and isinstance(plan, str):
        raise ValueError(f"generate: run_ahead must be False or None, because {plan}, got True")
    # On the CPU nothing overlaps, but a step costs the host less. In a batch some texts need fewer rows than others.
    pays = not on_cpu or len(context.texts) == 1
    if isinstance(plan, str) or not (pays if chosen is None else chosen):
        return None
    return partial(PacedLoop if is_paced else AheadLoop, plan=plan)

"""``HeadDrafter``: candidates from a head, level by level, as ``ModelDrafter`` draws them from a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pass_ext.decoding.arguments import type_of
from pass_ext.decoding.drafting.candidates import Batch, Proposal
from pass_ext.decoding.drafting.drafter import LOOK_AHEAD, N_GRAM, DraftContext, Drafter
from pass_ext.decoding.drafting.from_draft_model import ModelDrafter, chosen_tree
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.from_slots import lookahead_drafters
from pass_ext.decoding.drafting.heads.head import Head, HeadModule
from pass_ext.decoding.drafting.heads.head_calls import HeadCalls
from pass_ext.decoding.drafting.heads.mask_calls import MaskCalls
from pass_ext.decoding.drafting.heads.slots_below import slots_below
from pass_ext.decoding.methods import HeadMethod
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.planning.plan import Plan, check_is_planned, draft_hit_rates, draft_plan, method_plan
from pass_ext.decoding.session.session import Session
from pass_ext.ops.common.rules import RULES
from pass_ext.tree import Tree


class HeadDrafter(ModelDrafter):
    """Fills a tree, numbered level by level, with the tokens of a head.

    Args:
        pace: if the tree was planned from the times of calls.
    """

    rules = tuple(RULES)
    is_silent = True

    def __init__(self, head: Head, tree: Tree, context: DraftContext, pace: Pace | None = None) -> None:
        super().__init__(head, tree, context, pace=pace)
        self.name, self.taps = head.module.kind, head.module.taps
        self._head = head

    def begin(self, session: Session) -> None:
        """Allocates the head's caches."""
        head, masks, depth, graphs = self._head, self._head.module.masks, self.tree.max_depth, self._context.graphs
        if masks is None:
            self._head_calls = HeadCalls(head, session, depth, self._texts, graphs=graphs)
        else:
            self._head_calls = MaskCalls(head, masks, session, depth, self._texts, graphs=graphs)
        self._calls = self._head_calls

    def propose(self, batch: Batch) -> Proposal:
        self._head_calls.take(batch.hidden)
        return super().propose(batch)


def head_drafters(method: HeadMethod, context: DraftContext) -> Sequence[Drafter]:
    """The drafters of a method with a head: the head, if it is expected to gain anything, with slots below it or, without it,
    alone; and n-grams."""
    module, lookahead = _module_of(method), method.lookahead
    origins = {N_GRAM: method.ngram, LOOK_AHEAD: lookahead}
    context.check_origins(*(name for name, part in origins.items() if part is not None), module.kind)
    head = Head(module, context.target)
    chosen = chosen_tree(method, context, head)
    drafters: list[Drafter] = []
    if chosen is not None:
        drafter = HeadDrafter(head, chosen[0], context, chosen[1])
        drafters = [drafter]
        if lookahead is not None:
            drafters = [slots_below(lookahead, drafter, draft_hit_rates(method, head), context)]
    elif lookahead is not None:
        drafters = lookahead_drafters(lookahead, context)
    return [*drafters, *ngram_drafters(method.ngram, context)]


@method_plan.register
def _(method: HeadMethod, model: Any, requests: int, temperature: float) -> Plan:
    check_is_planned(method)
    target = packed_model(model)
    return draft_plan(method, target, Head(_module_of(method), target), requests)


def _module_of(method: HeadMethod) -> HeadModule:
    """The method's head; refuses any other object."""
    name, module = type(method).__name__, method.head
    if not isinstance(module, HeadModule) or module.method != name:
        what = type_of(module) if not isinstance(module, HeadModule) else f"one for {module.method}"
        raise TypeError(f"{name}: head must be one that load_drafter(path, model) has read for {name}, got {what}")
    return module

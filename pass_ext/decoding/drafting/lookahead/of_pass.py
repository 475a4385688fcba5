"""The drafters of ``PaSS``: which plan its look-ahead drafter follows, and what the rows of a step are chosen by."""

from __future__ import annotations

from pass_ext.decoding.drafting.candidates import drawing_mode
from pass_ext.decoding.drafting.drafter import LOOK_AHEAD, N_GRAM, DraftContext, Drafter
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.lookahead.chosen_rows import RowChoice
from pass_ext.decoding.drafting.lookahead.drafter import LookaheadDrafter
from pass_ext.decoding.methods import PaSS
from pass_ext.decoding.planning.constants import FEWEST_CHOSEN, MOST_ROWS
from pass_ext.decoding.planning.for_lookahead import pass_plan, slot_hit_rates
from pass_ext.decoding.planning.lookahead_tree import Plan
from pass_ext.ops.next import MAX_CHOSEN_ROWS, MAX_CHOSEN_SLOTS


def lookahead_drafters(method: PaSS, context: DraftContext) -> list[Drafter]:
    """The drafters of ``PaSS``: look-ahead, if it is expected to gain anything, and n-grams."""
    context.check_origins(*([N_GRAM] if method.ngram else []), LOOK_AHEAD)
    drafter = lookahead_drafter(method, context)
    return [*([] if drafter is None else [drafter]), *ngram_drafters(method.ngram, context)]


def lookahead_drafter(method: PaSS, context: DraftContext, *, is_alone: bool = True) -> LookaheadDrafter | None:
    """The drafter of the plan; None if no plan is expected to gain anything. is_alone: False: a draft model drafts too, and
    decides about pauses."""
    target = context.target
    method.lookahead.check_fits(target.table, embed=None if target.has_table else target.embed_tokens)
    shards = target.logit_shards
    if method.lookahead.rank and not target.has_table and (shards is None or shards.table_part is None):
        state = "quantised or offloaded" if shards is None else "not divided among the ranks as the logits are"
        raise ValueError(
            f"PaSS: look-ahead slots with transitions (rank {method.lookahead.rank}) compute with the model's embedding "
            f"table, and that of {target.name} is {state}: use slots of rank 0"
        )
    requests, greedy = len(context.texts), context.sampling.is_greedy
    plan, times = pass_plan(method, target, requests, greedy=greedy, graphs=context.graphs)
    if plan.is_plain:
        return None
    if context.chains_only and len(plan.tree.leaves) != 1:
        raise ValueError(
            f"PaSS: tree must be a chain, PaSS(tree=Tree.chain(n)), because rule {context.rule!r} takes chains, got "
            f"{len(plan.tree.leaves)} branches"
        )
    pace = None
    if times is not None and is_alone:
        pace = context.pace(times, plan.tokens_per_call, times.at(plan.rows * requests))
    choice = _choice(method, context, plan) if is_alone else None
    return LookaheadDrafter(method.lookahead, plan, context, choice, pace, recalls=method.recall)


def _choice(method: PaSS, context: DraftContext, plan: Plan) -> RowChoice | None:
    """What the rows of a step are chosen by; None: they are those of the plan. Where candidates are fixed proposals, leaving
    some out by their probability changes no text."""
    is_free = method.tree is None and method.passes == 1 and method.ngram is None
    if (
        not is_free
        or drawing_mode(context.sampling, context.rule) != "coupled"
        or context.target.logit_shards is not None
    ):
        return None
    # On a GPU every step has all rows, in use or not.
    has_price = method.rows == "auto" and context.device.type == "cpu"
    rows = MOST_ROWS if has_price else plan.rows if method.rows == "auto" else method.rows
    if not FEWEST_CHOSEN <= rows <= MAX_CHOSEN_ROWS or method.num_slots > min(MAX_CHOSEN_SLOTS, rows - 1):
        return None
    rates = slot_hit_rates(method.lookahead, method.num_slots, 1, greedy=context.sampling.is_greedy)
    return RowChoice(rows, tuple(max(level) for level in rates), has_price)

"""The drafters of ``PaSS``: which plan its look-ahead drafter follows, and who chooses the rows of a step beside it."""

from __future__ import annotations

from pass_ext.decoding.drafting.drafter import LOOK_AHEAD, N_GRAM, DraftContext, Drafter
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.levels import drawing_mode
from pass_ext.decoding.drafting.lookahead.drafter import LookaheadDrafter
from pass_ext.decoding.drafting.rows.choice import RowChoice, RowPrices
from pass_ext.decoding.drafting.rows.shared import SharedRows
from pass_ext.decoding.methods import PaSS
from pass_ext.decoding.planning.for_lookahead import pass_plan, slot_hit_rates
from pass_ext.ops.next import MAX_CHOSEN_ROWS, MAX_CHOSEN_SLOTS
from pass_ext.tree import Tree

_FEWEST_CHOSEN = 5  # rows: of fewer, all places take nearly the same
_MOST_PRICED = 32  # rows of a step that are chosen by their prices


def lookahead_drafters(method: PaSS, context: DraftContext) -> list[Drafter]:
    """The drafters of ``PaSS``: look-ahead, if it is expected to gain anything, and n-grams."""
    context.check_origins(*([N_GRAM] if method.ngram else []), LOOK_AHEAD)
    drafter = lookahead_drafter(method, context, pauses=True)
    return [*([] if drafter is None else [drafter]), *ngram_drafters(method.ngram, context)]


def lookahead_drafter(method: PaSS, context: DraftContext, *, pauses: bool) -> LookaheadDrafter | None:
    """The drafter of the plan; None if no plan is expected to gain anything. pauses: True: pauses by the plan's step times."""
    target = context.target
    method.lookahead.check_fits(target.table, embed=None if target.has_table else target.embed_tokens)
    shards = target.logit_shards
    if method.lookahead.rank and not target.has_table and (shards is None or shards.table_part is None):
        state = "quantised or offloaded" if shards is None else "not divided among the ranks as the logits are"
        raise ValueError(
            f"PaSS: look-ahead slots with transitions (rank {method.lookahead.rank}) compute with the model's embedding "
            f"table, and that of {target.name} is {state}: use slots of rank 0"
        )
    shares = pauses and _may_share(method, context)
    greedy = context.sampling.is_greedy
    plan, times = pass_plan(method, target, 1 if shares else len(context.texts), greedy=greedy, graphs=context.graphs)
    if plan.is_plain:
        return None
    if context.chains_only and len(plan.tree.leaves) != 1:
        raise ValueError(
            f"PaSS: tree must be a chain, PaSS(tree=Tree.chain(n)), because rule {context.rule!r} takes chains, got "
            f"{len(plan.tree.leaves)} branches"
        )
    if shares and times is not None:
        rates = slot_hit_rates(method.lookahead, plan.slots, 1, greedy=greedy)
        nodes = Tree(plan.tree.parents[: plan.tree.num_nodes])
        deepest = max(*plan.tree.depths, plan.slots)
        shared = SharedRows(times, context.texts, nodes, plan.slots, deepest, rates)
        return LookaheadDrafter(method.lookahead, plan, context, shared, recalls=method.recall)
    drafter = LookaheadDrafter(method.lookahead, plan, context, recalls=method.recall)
    drafter.step_times = times if pauses else None
    if pauses and _may_choose(method, context):
        rates = slot_hit_rates(method.lookahead, method.num_slots, 1, greedy=greedy)
        best = tuple(max(level) for level in rates)
        if method.rows != "auto":
            drafter.choose_by(RowChoice(method.rows, best))
        elif times is not None and len(context.texts) == 1 and context.device.type == "cpu":
            prices = RowPrices(times, plan.rows, plan.tokens_per_call)
            drafter.choose_by(RowChoice(_MOST_PRICED, best, prices))
    return drafter


def _may_share(method: PaSS, context: DraftContext) -> bool:
    """True if each request may have other rows: candidates are fixed proposals, so that leaving some out by their probability
    changes no text, and no other drafter adds to them. A single text without a grammar has its rows chosen by the device."""
    several = len(context.texts) > 1 or context.guides is not None
    return method.rows == "auto" and several and _is_free(method, context)


def _may_choose(method: PaSS, context: DraftContext) -> bool:
    """True if the device may choose the rows of each step."""
    rows, slots = _MOST_PRICED if method.rows == "auto" else method.rows, method.num_slots
    fits = _FEWEST_CHOSEN <= rows <= MAX_CHOSEN_ROWS and slots <= min(MAX_CHOSEN_SLOTS, rows - 1)
    return fits and context.target.logit_shards is None and context.guides is None and _is_free(method, context)


def _is_free(method: PaSS, context: DraftContext) -> bool:
    """True if steps may have other rows than the plan's, by the candidates' probabilities."""
    planned = method.tree is None and method.passes == 1 and method.ngram is None
    return planned and drawing_mode(context.sampling, context.rule) == "coupled"

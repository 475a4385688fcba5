"""Candidates from look-ahead slots: the logits that the slots get in one call give the candidates of the next step.

With a ``RowChoice`` each step has the rows that suit the place, as ``next_tree_`` chooses them. Else a step is full (the plan's
tree and groups) where the last accepted node had a group, and a probe (the root and one group) where it had none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from pass_ext.decoding.drafting.candidates import (
    Batch,
    Candidates,
    Proposal,
    drawing_mode,
    filled,
    with_groups,
)
from pass_ext.decoding.drafting.device_rows import DeviceRows, HostDecides, RowChoice
from pass_ext.decoding.drafting.drafter import LOOK_AHEAD, N_GRAM, DraftContext, Drafter
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.slot_tokens import GrowingTexts, TreeFiller, rows_of
from pass_ext.decoding.methods import PaSS
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.planning.constants import FEWEST_CHOSEN, MOST_ROWS
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.planning.plan import Plan, pass_plan, slot_hit_rates
from pass_ext.decoding.session.session import Session
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.ops.next import MAX_CHOSEN_ROWS, MAX_CHOSEN_SLOTS, REPORT_NUMBERS, next_tree_
from pass_ext.tree import Tree

_ROOT = Tree.chain(0)


class LookaheadDrafter(Drafter):
    """Drafts from the slots that the last call had.

    Args:
        choice: how the rows of each step are chosen; None: all steps have those of the plan.
        pace: of the generation; None: rows cost nothing.
        recalls: tokens that the text recalls rise.
    """

    name = LOOK_AHEAD
    is_silent = True

    def __init__(
        self,
        lookahead: LookaheadEmbedding,
        plan: Plan,
        context: DraftContext,
        choice: RowChoice | None = None,
        pace: Pace | None = None,
        *,
        recalls: bool = False,
    ) -> None:
        table = context.target.table
        slots = plan.slots if choice is None else len(choice.rates)
        self.max_depth = plan.tree.max_depth if choice is None else slots
        self.deepest_row = max(plan.tree.depths) if choice is None else slots + 1
        self.prompt_slots = slots
        self.pace = pace
        self.tree = Tree(plan.tree.parents[: plan.tree.num_nodes])
        self.groups = tuple(plan.groups.items())
        self._lookahead, self._slots, self._context, self._choice = lookahead, slots, context, choice
        self._probe = Candidates(_ROOT, groups=((0, slots),))
        options = context.sampling, context.rule, context.target.logit_shards, context.guides
        stored = context.target.stored_table
        self._filler = TreeFiller(lookahead, self.tree, table, *options, self.groups, recalls=recalls, stored=stored)
        self._offers = self._filler.offers
        self._texts = GrowingTexts(table.device) if self._offers.recalls else None
        if choice is not None:
            self._rates = uploaded(choice.rates, table.device, torch.float32)
            self._costs = torch.zeros(choice.rows, device=table.device) if choice.has_cost else None

    def device_rows(self, *, is_synthetic: bool) -> DeviceRows:
        if self._choice is not None and not is_synthetic:
            return DeviceRows(with_groups(_ROOT, self._probe.groups), self._offers, self._choice)
        if 0 not in dict(self.groups):
            raise HostDecides("the root has no look-ahead slots in every step")
        tree = with_groups(self.tree, self.groups)
        if len(tree) > MAX_CHOSEN_ROWS:
            raise HostDecides(f"a step of {len(tree)} rows is longer than {MAX_CHOSEN_ROWS}")
        return DeviceRows(tree, self._offers)

    def begin(self, session: Session) -> None:
        session.set_slots(self._lookahead, self._slots)

    def propose(self, batch: Batch) -> Proposal:
        if self._choice is not None:
            return Proposal(self._chosen(batch, self._choice))
        requests, rows = groups_after(batch)
        candidates = [self._probe if levels else None for levels in batch.levels]
        if not requests:
            return Proposal(candidates)
        texts = [batch.texts[b] for b in requests]
        roots, places = [text[-1] for text in texts], [len(text) - 1 for text in texts]
        known = None if self._texts is None else self._texts.of(batch.texts, requests)
        full = self._filler.fill(rows_of(batch.logits, rows), requests, roots, places, known)
        for b, part in zip(requests, full.candidates, strict=True):
            candidates[b] = part
        return replace(full, candidates=candidates)

    def _chosen(self, batch: Batch, choice: RowChoice) -> list[Candidates | None]:
        """The rows that suit the place of each request; None: the root alone."""
        if self._costs is not None and self.pace is not None:
            costs = self.pace.costs(choice.rows, max(1, sum(left > 0 for left in batch.remaining)))
            if costs is not None:
                self._costs.copy_(uploaded(costs, self._costs.device, torch.float32))
        chosen: list[Candidates | None] = [None] * len(batch.levels)
        active = [b for b, levels in enumerate(batch.levels) if levels]
        if not active:
            return chosen
        count, most, device = len(active), choice.rows, self._context.device
        predicting = [_slots_after(batch.candidates[b], batch.last_nodes[b]) for b in active]
        # For the op the step before was each root with the slots that predict what follows it.
        ids = [
            [batch.texts[b][-1], *(-1 - slot for slot in range(len(rows)))]
            for b, rows in zip(active, predicting, strict=True)
        ]
        step = torch.zeros(3, count, most, dtype=torch.int64, device=device)
        step[0, :, : max(map(len, ids))] = uploaded(filled(ids, 0), device)
        parents = torch.arange(-1, most - 1, dtype=torch.int32, device=device).repeat(count, 1)
        lengths = uploaded([len(batch.texts[b]) - 1 for b in active], device)
        limits = [len(batch.texts[b]) + 1 + batch.levels[b] for b in active]
        zeros = torch.zeros(count, 1, dtype=torch.int32, device=device)
        report = torch.empty(count, REPORT_NUMBERS + 1, dtype=torch.int64, device=device)
        next_tree_(
            step,
            parents,
            lengths,
            zeros.flatten().clone(),
            report,
            limits=uploaded(limits, device),
            emitted=step[0, :, :1].contiguous(),
            path=zeros,
            num_accepted=zeros.flatten(),
            status=zeros.flatten(),
            rates=self._rates,
            costs=self._costs,
            text=None if self._texts is None else self._texts.of(batch.texts, active),
            **self._offered(batch, active, predicting),
            **self._context.sampling.of_requests(uploaded(active, device)).keywords(),
        )
        ids, tokens = step[:2].tolist()
        for b, shape, *rows in zip(active, report.tolist(), ids, tokens, parents.tolist(), strict=True):
            chosen[b] = _candidates(*rows, used=shape[3], nodes=shape[4])
        return chosen

    def _offered(self, batch: Batch, active: Sequence[int], predicting: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The tokens that these rows of each request's step offer, as arguments of ``next_tree_``; under a grammar none that it
        forbids after the root. Deeper candidates that it forbids are left out where the candidates of all drafters meet."""
        if not any(predicting):
            return {}
        device, first_rows, guides = batch.logits.device, batch.first_rows, self._context.guides
        first = [first_rows[b] for b in active]
        allowed = None
        if guides is not None:
            there = [i for i, rows in enumerate(predicting) if rows]
            roots = [[batch.texts[active[i]][-1]] for i in there]
            masks = guides.below(_ROOT, [active[i] for i in there], roots, [0])
            allowed = masks.new_full((len(batch.logits), masks.shape[1]), -1)
            allowed[uploaded([first[i] + predicting[i][0] for i in there], device)] = masks
        offered = self._offers.top_of_rows(batch.logits, 1, allowed)
        picked = [[at + row for row in rows] for at, rows in zip(first, predicting, strict=True)]
        index = uploaded(filled(picked, 0), device)
        return offered | {name: offered[name][0, index] for name in ("offered", "scores")} | {"first": 1}


def groups_after(batch: Batch) -> tuple[list[int], list[list[int]]]:
    """The requests whose last accepted node had look-ahead slots, and the rows of these in the logits."""
    rows: dict[int, list[int]] = {}
    for b, (part, first) in enumerate(zip(batch.candidates, batch.first_rows, strict=True)):
        group = part.rows.group_rows(batch.last_nodes[b]) if part is not None else ()
        if batch.levels[b] and len(group):
            rows[b] = [first + row for row in group]
    return list(rows), list(rows.values())


def _slots_after(part: Candidates | None, node: int) -> Sequence[int]:
    """The rows of the look-ahead slots that predict what follows a node: its own, or those of the nearest node above it that
    has some, without the ones already passed."""
    passed = 0
    while part is not None and node >= 0:
        if len(rows := part.rows.group_rows(node)):
            return rows[passed:]
        node, passed = part.rows.parents[node], passed + 1
    return ()


def _candidates(
    ids: Sequence[int], tokens: Sequence[int], parents: Sequence[int], *, used: int, nodes: int
) -> Candidates | None:
    """The rows in use of a request, as ``next_tree_`` lays them; None: the root alone."""
    if used == 1:
        return None
    groups: dict[int, int] = {}
    for row in range(nodes, used):
        if ids[row] == -1:  # the first slot of a group
            node = parents[row]
        groups[node] = groups.get(node, 0) + 1
    return Candidates(_tree(tuple(parents[:nodes])), tokens[1:nodes], groups=tuple(groups.items()))


_tree = lru_cache(maxsize=4096)(Tree)


def lookahead_drafters(method: PaSS, context: DraftContext) -> list[Drafter]:
    """The drafters of ``PaSS``: look-ahead, if it is expected to gain anything, and n-grams."""
    context.check_origins(*([N_GRAM] if method.ngram else []), LOOK_AHEAD)
    drafter = lookahead_drafter(method, context)
    return [*([] if drafter is None else [drafter]), *ngram_drafters(method.ngram, context)]


def lookahead_drafter(method: PaSS, context: DraftContext, *, is_alone: bool = True) -> LookaheadDrafter | None:
    """The drafter of the plan; None if no plan is expected to gain anything. is_alone: False: a draft model decides about
    pauses."""
    target = context.target
    check_slots(method, target)
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
        pace = context.pace(times, plan.tokens_per_call, times.at(plan.rows * requests), method.lookahead)
    choice = _choice(method, context, plan) if is_alone else None
    return LookaheadDrafter(method.lookahead, plan, context, choice, pace, recalls=method.recall)


def check_slots(method: PaSS, target: Adapted) -> None:
    """Refuses slots of another model, and those that this one has no table for."""
    method.lookahead.check_fits(target.table, embed=None if target.has_table else target.embed_tokens)
    shards = target.logit_shards
    if method.lookahead.rank and target.stored_table is None and (shards is None or shards.table_part is None):
        state = "quantised or offloaded" if shards is None else "not divided among the ranks as the logits are"
        raise ValueError(
            f"PaSS: look-ahead slots with transitions (rank {method.lookahead.rank}) compute with the model's embedding "
            f"table, and that of {target.name} is {state}: use slots of rank 0"
        )


def _choice(method: PaSS, context: DraftContext, plan: Plan) -> RowChoice | None:
    """How the rows of a step are chosen; None: they are those of the plan. Where candidates are fixed proposals, leaving some
    out by their probability changes no text."""
    is_free = (
        method.tree is None and method.passes == 1 and method.ngram is None and context.target.logit_shards is None
    )
    if not is_free or drawing_mode(context.sampling, context.rule) != "coupled":
        return None
    # On a GPU every step has all rows, in use or not.
    has_cost = method.rows == "auto" and context.device.type == "cpu"
    rows = MOST_ROWS if has_cost else plan.rows if method.rows == "auto" else method.rows
    if not FEWEST_CHOSEN <= rows <= MAX_CHOSEN_ROWS or method.num_slots > min(MAX_CHOSEN_SLOTS, rows - 1):
        return None
    rates = slot_hit_rates(method.lookahead, method.num_slots, 1, greedy=context.sampling.is_greedy)
    return RowChoice(rows, tuple(max(level) for level in rates), has_cost)

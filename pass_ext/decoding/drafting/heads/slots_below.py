"""``SlotsBelow``: look-ahead slots draft below the chain of a head.

    levels 1 … k       the head's, a call of its own for each
    levels k + 1 … m   of slots k + 1 … m after the last accepted node, which the model's last call has computed: slot i
                       predicts the token at level i, and its transition scores begin at the head's last draft

Slots stand after the nodes where the plan of a chain of m levels has some; after any other the next step has the head's chain
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from pass_ext.decoding.drafting.candidates import Batch, Candidates, Proposal, filled
from pass_ext.decoding.drafting.drafter import DraftContext, Drafter
from pass_ext.decoding.drafting.from_draft_model import ModelDrafter
from pass_ext.decoding.drafting.from_slots import check_slots, groups_after
from pass_ext.decoding.drafting.slot_tokens import TreeFiller, rows_of
from pass_ext.decoding.methods import PaSS
from pass_ext.decoding.planning.plan import Costs, Plan, Rates, plan_of_tree, slot_hit_rates
from pass_ext.decoding.planning.step_times import measured_times
from pass_ext.decoding.session.session import Session
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.tree import Tree


class SlotsBelow(Drafter):
    """Drafts with a head, and below its chain with the slots of a ``PaSS``.

    Args:
        head: drafts chains.
        plan: of a chain as deep as there are slots, with groups.
    """

    def __init__(self, head: ModelDrafter, method: PaSS, plan: Plan, context: DraftContext) -> None:
        self.name, self.rules, self.taps, self.pace = head.name, head.rules, head.taps, head.pace
        self.max_depth = self.prompt_slots = plan.slots
        self.deepest_row = max(plan.tree.depths)
        self._head, self._lookahead, self._slots, self._above = head, method.lookahead, plan.slots, head.max_depth
        self._groups = tuple(plan.groups.items())
        target, below = context.target, Tree.chain(plan.slots - head.max_depth)
        options = target.table, context.sampling, context.rule, target.logit_shards
        self._filler = TreeFiller(
            method.lookahead, below, *options, recalls=method.recall, stored=target.stored_table
        )  # what a grammar forbids is left out where the candidates of all drafters meet

    def attached(self) -> AbstractContextManager[None]:
        return self._head.attached()

    def begin(self, session: Session) -> None:
        """Allocates the head's caches."""
        session.set_slots(self._lookahead, self._slots)
        self._head.begin(session)

    def propose(self, batch: Batch) -> Proposal:
        above = self._head.propose(batch)
        chains = [[] if part is None else [*part.tokens] for part in above.candidates]
        known, rows = groups_after(batch)
        going = [(b, own) for b, own in zip(known, rows, strict=True) if len(chains[b]) == self._above]
        if going:
            requests = [b for b, _ in going]
            texts = [[*batch.texts[b], *chains[b]] for b in requests]
            text = uploaded(filled(texts, 0), batch.logits.device)
            slots = rows_of(batch.logits, [own[self._above :] for _, own in going])
            ends, places = [text[-1] for text in texts], [len(text) - 1 for text in texts]
            below = self._filler.fill(slots, requests, ends, places, text).candidates
            for b, part in zip(requests, below, strict=True):
                if part is not None:
                    chains[b] += part.tokens[: batch.levels[b] - self._above]
        return Proposal([self._with_slots(chain) if chain else None for chain in chains])

    def _with_slots(self, chain: Sequence[int]) -> Candidates:
        groups = tuple((node, slots) for node, slots in self._groups if node <= len(chain))
        return Candidates(Tree.chain(len(chain)), chain, groups=groups)


def slots_below(method: PaSS, head: ModelDrafter, rates: Rates, context: DraftContext) -> Drafter:
    """The head with slots below its chain; the head alone if none are expected to gain anything. rates: the head's."""
    target, slots, above = context.target, method.num_slots, head.max_depth
    check_slots(method, target)
    if slots <= above:
        return head
    own = slot_hit_rates(method.lookahead, slots, 1, greedy=context.sampling.is_greedy)
    times = measured_times(target, graphs=context.graphs, lookahead=method.lookahead) if method.rows == "auto" else None
    costs = Costs(None if times is None else times.at, requests=len(context.texts))
    of_head = (*rates[:above], *[rates[-1]] * (above - len(rates)))
    best = [[max(level)] for level in (*of_head, *own[above:])]
    most = method.rows if isinstance(method.rows, int) else None
    plan = plan_of_tree(Tree.chain(slots), best, costs, slots=slots, rows=most)
    return SlotsBelow(head, method, plan, context) if plan.groups else head

"""``LookaheadDrafter``: the logits of a group of slots fill the plan's tree for the next step.

A step is full (the plan's tree and groups) where the last accepted node had a group, else a probe (the root and one group).
With rows="auto", in a batch or under a grammar, each request takes the part of the tree and the slots that pay
(rows/shared.py). Where the device makes the rows (loop/chosen_step.py), it may choose them at each place by a ``RowChoice``.
"""

from __future__ import annotations

from collections.abc import Sequence

from pass_ext.decoding.drafting.drafter import LOOK_AHEAD, DraftContext, Drafter
from pass_ext.decoding.drafting.lookahead.offers import Offers
from pass_ext.decoding.drafting.lookahead.recall import GrowingTexts
from pass_ext.decoding.drafting.lookahead.short_rows import rows_of
from pass_ext.decoding.drafting.lookahead.tree_filler import Filled, TreeFiller
from pass_ext.decoding.drafting.rows.choice import RowChoice
from pass_ext.decoding.drafting.rows.shared import SharedRows
from pass_ext.decoding.drafting.step import Batch, Candidates, Proposal
from pass_ext.decoding.planning.lookahead_tree import Plan
from pass_ext.decoding.session.session import Session
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.tree import Tree


class LookaheadDrafter(Drafter):
    """Fills the plan's tree from the slots that the last call had.

    Args:
        lookahead: the embeddings.
        plan: the plan of a step.
        context: the generation.
        shared: chooses the rows of each step; None: all steps have those of the plan.
        recalls: tokens that the text recalls rise.
    """

    name = LOOK_AHEAD

    def __init__(
        self,
        lookahead: LookaheadEmbedding,
        plan: Plan,
        context: DraftContext,
        shared: SharedRows | None = None,
        *,
        recalls: bool = False,
    ) -> None:
        table = context.target.table
        self.max_depth = plan.tree.max_depth
        self.deepest_row = max(*plan.tree.depths, plan.slots)
        self._slots = plan.slots
        self.prompt_slots = plan.slots if shared is None or shared.begins_with_slots else 0
        self._lookahead, self.shared = lookahead, shared
        self.choice: RowChoice | None = None
        """What the device may choose rows by; None: it follows the plan."""
        self.tree = Tree(plan.tree.parents[: plan.tree.num_nodes])
        self.groups = tuple(plan.groups.items())
        self._probe = Candidates(Tree.chain(0), groups=((0, plan.slots),))
        law = context.sampling, context.rule, context.target.logit_shards, context.guides
        self._filler = TreeFiller(
            lookahead, self.tree, table, *law, has_probabilities=shared is not None, recalls=recalls
        )
        self._texts = GrowingTexts(table.device) if self.offers.recalls else None

    @property
    def offers(self) -> Offers:
        """The tokens that look-ahead rows offer."""
        return self._filler.offers

    def choose_by(self, choice: RowChoice) -> None:
        """Lets the device choose rows, where it makes them."""
        self.choice, slots = choice, len(choice.rates)
        self.max_depth = max(self.max_depth, slots)
        self.deepest_row = max(self.deepest_row, slots + 1)

    def begin(self, session: Session) -> None:
        """Puts the slots' embeddings into the session."""
        lookahead = self._lookahead
        slots = self._slots if self.choice is None else max(self._slots, len(self.choice.rates))
        session.set_slots(lookahead, slots)

    def propose(self, batch: Batch) -> Proposal:
        """As ``Drafter``."""
        if self.shared is not None:
            return Proposal(self._shared(self.shared, batch))
        candidates = [self._probe if levels else None for levels in batch.levels]
        requests, rows = self._groups(batch)
        if not requests:
            return Proposal(candidates)
        filled = self._fill(batch, requests, rows)
        for i, b in enumerate(requests):
            draft_rows = filled.draft_rows[i] if filled.draft_rows else None
            candidates[b] = Candidates(self.tree, filled.tokens[i], draft_rows, self.groups)
        return Proposal(candidates, filled.draft_logits, filled.draft_allowed)

    def learn(self, gained: Sequence[int]) -> None:
        """As ``Drafter``."""
        if self.shared is not None:
            self.shared.learn(gained)

    def _shared(self, shared: SharedRows, batch: Batch) -> list[Candidates | None]:
        shared.begin(sum(len(step.tree) for step in batch.steps if step is not None))
        requests, rows = self._groups(batch)
        drafts = {}
        if requests:
            # Groups have up to so many slots: the last row stands for those that are not there.
            most = self._slots
            filled = self._fill(batch, requests, [[*group, *[group[-1]] * (most - len(group))] for group in rows])
            assert filled.probabilities is not None
            for b, group, tokens, chances in zip(requests, rows, filled.tokens, filled.probabilities, strict=True):
                depths = self.tree.depths[1:]
                there = [token if depth <= len(group) else -1 for token, depth in zip(tokens, depths, strict=True)]
                drafts[b] = there, chances
        return shared.choose(batch.levels, batch.remaining, drafts)

    def _groups(self, batch: Batch) -> tuple[list[int], list[list[int]]]:
        """The requests whose last accepted node had look-ahead slots, and the rows of these in the logits."""
        requests: list[int] = []
        rows: list[list[int]] = []
        for b, (step, first) in enumerate(zip(batch.steps, batch.first_rows, strict=True)):
            group = step.tree.group_rows(batch.last_nodes[b]) if step is not None else ()
            if batch.levels[b] and len(group):
                requests.append(b)
                rows.append([first + row for row in group])
        return requests, rows

    def _fill(self, batch: Batch, requests: Sequence[int], rows: list[list[int]]) -> Filled:
        slots = rows_of(batch.logits, rows)
        texts = [batch.texts[b] for b in requests]
        roots, places = [text[-1] for text in texts], [len(text) - 1 for text in texts]
        known = None if self._texts is None else self._texts.of(batch.texts, requests)
        return self._filler.fill(slots, requests, roots, places, known)

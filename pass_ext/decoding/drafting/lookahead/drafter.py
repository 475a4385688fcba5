"""``LookaheadDrafter``: the logits of a group of slots fill the plan's tree for the next step.

A step is full (the plan's tree and groups) where the last accepted node had a group, else a probe (the root and one group).
With a ``RowChoice``, steps have the rows that suit the place: chosen by the device where it makes them, else here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pass_ext.decoding.drafting.candidates import Batch, Candidates, Groups, Proposal
from pass_ext.decoding.drafting.drafter import LOOK_AHEAD, DraftContext, Drafter
from pass_ext.decoding.drafting.lookahead.chosen_rows import Offer, RowChoice, choose_rows
from pass_ext.decoding.drafting.lookahead.device_rows import ChosenRows, FixedRows, HostDecides
from pass_ext.decoding.drafting.lookahead.recall import GrowingTexts
from pass_ext.decoding.drafting.lookahead.short_rows import rows_of
from pass_ext.decoding.drafting.lookahead.tree_filler import Filled, TreeFiller
from pass_ext.decoding.planning.lookahead_tree import Plan
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.session.session import Session
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.tree import Tree


class LookaheadDrafter(Drafter):
    """Fills the plan's tree from the slots that the last call had.

    Args:
        lookahead: the embeddings.
        plan: the plan of a step.
        context: the generation.
        choice: what rows are chosen by where the device makes them, and with a pace where the host does; None: all steps
            have those of the plan.
        pace: what rows cost; None: nothing.
        recalls: tokens that the text recalls rise.
    """

    name = LOOK_AHEAD

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
        most_slots = max(plan.slots, 0 if choice is None else len(choice.rates))
        self.max_depth = max(plan.tree.max_depth, 0 if choice is None else len(choice.rates))
        self.deepest_row = max(*plan.tree.depths, most_slots + (choice is not None))
        self.prompt_slots = plan.slots
        self.pace = pace
        self.tree = Tree(plan.tree.parents[: plan.tree.num_nodes])
        self.groups = tuple(plan.groups.items())
        self._lookahead, self._slots, self._most_slots = lookahead, plan.slots, most_slots
        self._choice = choice
        self._chooses = pace is not None and choice is not None
        self._probe = Candidates(Tree.chain(0), groups=((0, plan.slots),))
        law = context.sampling, context.rule, context.target.logit_shards, context.guides
        self._filler = TreeFiller(lookahead, self.tree, table, *law, has_probabilities=self._chooses, recalls=recalls)
        self._texts = GrowingTexts(table.device) if self._filler.offers.recalls else None

    def device_rows(self, *, is_synthetic: bool) -> FixedRows | ChosenRows:
        """As ``DrafterOnDevice``."""
        if self._choice is not None and not is_synthetic:
            return ChosenRows(self._choice, self._filler.offers)
        if 0 not in dict(self.groups):
            raise HostDecides("the root has no look-ahead slots in every step")
        return FixedRows(self.tree, self.groups, self.prompt_slots, self._filler.offers)

    def begin(self, session: Session) -> None:
        """Puts the slots' embeddings into the session."""
        session.set_slots(self._lookahead, self._most_slots)

    def propose(self, batch: Batch) -> Proposal:
        """As ``Drafter``."""
        requests, rows = self._groups_behind(batch)
        if self._chooses:
            return Proposal(self._chosen(batch, requests, rows))
        candidates = [self._probe if levels else None for levels in batch.levels]
        if not requests:
            return Proposal(candidates)
        filled = self._fill(batch, requests, rows)
        for i, b in enumerate(requests):
            draft_rows = filled.draft_rows[i] if filled.draft_rows else None
            candidates[b] = Candidates(self.tree, filled.tokens[i], draft_rows, self.groups)
        return Proposal(candidates, filled.draft_logits, filled.draft_allowed)

    def _chosen(self, batch: Batch, requests: Sequence[int], rows: list[list[int]]) -> list[Candidates | None]:
        """The candidates and slots that suit the place; None: the root alone."""
        assert self._choice is not None and self.pace is not None
        active = [b for b, levels in enumerate(batch.levels) if levels]
        worth, count = self._choice.worth[: self._slots], sum(left > 0 for left in batch.remaining)
        tokens: dict[int, list[int]] = {}
        offers = {b: self._offer(batch.levels[b], (), (), worth) for b in active}
        if requests:
            # Groups have up to so many slots: the last row stands for those that are not there.
            whole = [[*group, *[group[-1]] * (self._slots - len(group))] for group in rows]
            filled = self._fill(batch, requests, whole)
            assert filled.probabilities is not None
            for b, group, found, chances in zip(requests, rows, filled.tokens, filled.probabilities, strict=True):
                depths = self.tree.depths[1:]
                tokens[b] = [token if depth <= len(group) else -1 for token, depth in zip(found, depths, strict=True)]
                offers[b] = self._offer(batch.levels[b], tokens[b], chances, worth)
        clock, others = self.pace.clock, count - len(active)
        shares = choose_rows(list(offers.values()), lambda n: clock.seconds(n + others, is_plain=n == len(active)))
        chosen: list[Candidates | None] = [None] * len(batch.levels)
        for b, share in zip(offers, shares, strict=True):
            if len(share.nodes) > 1 or share.slots:
                tree, groups = _pruned(self.tree, tuple(share.nodes), tuple(sorted(share.slots.items())))
                chosen[b] = Candidates(tree, [tokens[b][node - 1] for node in share.nodes[1:]], groups=groups)
        return chosen

    def _offer(
        self, levels: int, tokens: Sequence[int], probabilities: Sequence[float], worth: Sequence[float]
    ) -> Offer:
        """What a request with these candidates may take, which are no deeper than ``levels``."""
        tree, chances = self.tree, [1.0] + [0.0] * (self.tree.num_nodes - 1)
        for node, (token, chance) in enumerate(zip(tokens, probabilities, strict=True), 1):
            if token >= 0 and tree.depths[node] <= levels:
                chances[node] = min(chance, 1.0)
        # Slots that foresee tokens behind the end of the text are worth nothing.
        slots = [max(0, min(self._slots, self.deepest_row - depth, levels - 1 - depth)) for depth in tree.depths]
        return Offer(tree.parents, chances, worth, slots)

    def _groups_behind(self, batch: Batch) -> tuple[list[int], list[list[int]]]:
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


@lru_cache(maxsize=4096)
def _pruned(tree: Tree, nodes: tuple[int, ...], slots: Groups) -> tuple[Tree, Groups]:
    """The tree of these nodes, in ascending order, and the slots behind them by their new numbers."""
    place = {node: index for index, node in enumerate(nodes)}
    return Tree([place.get(tree.parents[node], -1) for node in nodes]), tuple((place[n], count) for n, count in slots)

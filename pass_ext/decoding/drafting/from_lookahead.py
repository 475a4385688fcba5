"""Candidates from look-ahead slots: the logits of a group of slots fill the plan's tree for the next step.

Slot i's logits, plus transition scores left[parent] · right[token] where the embeddings have them, rank the candidates at depth
i + 1 below each parent; child k of a node is its candidate of rank k. With rule "coupled" candidates are the best under the
target's own noise; for rules that need the drafts' distribution q they are drawn from it, and q's logits are kept.

A step is full (the plan's tree and groups) where the last accepted node had a group, else a probe (the root and one group). In
a batch with rows="auto" each request takes the part of the tree and the slots that pay (rows/shared.py). Where the device makes
the rows (loop/chosen_step.py), it may choose them at each place by a ``RowChoice``.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import embedding

from pass_ext.decoding.drafting.drafter import LOOK_AHEAD, N_GRAM, DraftContext, Drafter
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.levels import are_judged_by_logits, draw_children, drawing_mode, levels_of
from pass_ext.decoding.drafting.rows.choice import RowChoice, RowPrices
from pass_ext.decoding.drafting.rows.shared import SharedRows
from pass_ext.decoding.drafting.rows.short import ShortRows
from pass_ext.decoding.drafting.step import Batch, Candidates, Proposal
from pass_ext.decoding.methods import PaSS
from pass_ext.decoding.models.logit_shards import LogitShards
from pass_ext.decoding.planning.for_lookahead import pass_plan, slot_hit_rates
from pass_ext.decoding.planning.lookahead_tree import Plan
from pass_ext.decoding.requests.grammar.guides import Guides
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.session import Session
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.draft import draft_sample
from pass_ext.ops.next import MAX_CHOSEN_ROWS, MAX_CHOSEN_SLOTS, next_rows_
from pass_ext.tree import Tree

_FEWEST_CHOSEN = 5  # rows: of fewer, all places take nearly the same
_MOST_PRICED = 32  # rows of a step that are chosen by their prices
_SHORTLIST = 64  # candidates of a slot that transition scores reorder, or more where a node has more children
_tables: MutableMapping[LookaheadEmbedding, tuple[Any, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


class Filled(NamedTuple):
    """The tokens of some requests' trees."""

    tokens: list[list[int]]
    """For each request the tokens of nodes 1, 2, …; -1: no token."""
    draft_logits: Tensor | None
    """``[R, V]``, the logits that tokens were drawn from, for rules that need them."""
    draft_rows: list[list[int]] | None
    """For each request and node the row of ``draft_logits`` that its children were drawn from, or -1."""
    draft_allowed: Tensor | None = None
    """``[R, ceil(V / 32)]``, the masks that tokens were drawn under."""
    probabilities: list[list[float]] | None = None
    """For each request the slots' probabilities of these tokens."""


class LookaheadDrafter(Drafter):
    """Fills the plan's tree from the slots that the last call had.

    Args:
        lookahead: the embeddings.
        plan: the plan of a step.
        context: the generation.
        shared: chooses the rows of each step; None: all steps have those of the plan.
    """

    name = LOOK_AHEAD

    def __init__(
        self, lookahead: LookaheadEmbedding, plan: Plan, context: DraftContext, shared: SharedRows | None = None
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
        self._filler = TreeFiller(lookahead, self.tree, table, *law, has_probabilities=shared is not None)

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
        deep = None if lookahead.deep is None else lookahead.deep[:, :slots].detach()
        session.set_slots(lookahead.weight[:slots].detach(), deep, lookahead.adapters, lookahead.prefix)

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
        shared.begin()
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
        slots = _rows_of(batch.logits, rows)
        texts = [batch.texts[b] for b in requests]
        roots, places = [text[-1] for text in texts], [len(text) - 1 for text in texts]
        return self._filler.fill(slots, requests, roots, places)


def lookahead_drafters(method: PaSS, context: DraftContext) -> list[Drafter]:
    """The drafters of ``PaSS``: look-ahead, if it is expected to gain anything, and n-grams."""
    context.check_origins(*([N_GRAM] if method.ngram else []), LOOK_AHEAD)
    drafter = lookahead_drafter(method, context, pauses=True)
    return [*([] if drafter is None else [drafter]), *ngram_drafters(method.ngram, context)]


def lookahead_drafter(method: PaSS, context: DraftContext, *, pauses: bool) -> LookaheadDrafter | None:
    """The drafter of the plan; None if no plan is expected to gain anything. pauses: True: pauses by the plan's step times."""
    target = context.target
    method.lookahead.check_fits(target.table)
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
        return LookaheadDrafter(method.lookahead, plan, context, shared)
    drafter = LookaheadDrafter(method.lookahead, plan, context)
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
    changes no text, and no other drafter or grammar adds to them."""
    return method.rows == "auto" and len(context.texts) > 1 and _is_free(method, context)


def _may_choose(method: PaSS, context: DraftContext) -> bool:
    """True if the device may choose the rows of each step."""
    rows, slots = _MOST_PRICED if method.rows == "auto" else method.rows, method.num_slots
    fits = _FEWEST_CHOSEN <= rows <= MAX_CHOSEN_ROWS and slots <= min(MAX_CHOSEN_SLOTS, rows - 1)
    return fits and context.target.logit_shards is None and _is_free(method, context)


def _is_free(method: PaSS, context: DraftContext) -> bool:
    """True if steps may have other rows than the plan's, by the candidates' probabilities."""
    planned = method.tree is None and method.passes == 1 and method.ngram is None
    return planned and drawing_mode(context.sampling, context.rule) == "coupled" and context.guides is None


class Offers:
    """The tokens that look-ahead rows offer as candidates, in mode "coupled".

    Args:
        lookahead: the embeddings.
        tree: of candidates.
        table: the model's input embeddings.
        shards: the ranks that hold the columns of the logits; None: this process has all.
    """

    def __init__(
        self, lookahead: LookaheadEmbedding, tree: Tree, table: Tensor, shards: LogitShards | None = None
    ) -> None:
        self._draw = draft_sample if shards is None else shards.draft_sample
        tables = _transition_tables(lookahead, table, shards) if lookahead.rank else None
        self.transition = None if tables is None else (tables[0].detach(), tables[1].detach())
        widest = max(len(tree.children(node)) for node in range(tree.num_nodes))
        self.count = min(widest if self.transition is None else max(_SHORTLIST, widest), table.shape[0])
        self._shortlist = min(_SHORTLIST, table.shape[0])

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for offers that read the same memory."""
        return (self.count, *(table.data_ptr() for table in self.transition or ()))

    def draws(self, sampling: BatchSampling) -> bool:
        """True: the offered tokens are drawn, by the noise of their positions."""
        return self.transition is None and not sampling.is_greedy

    def top_of_rows(self, logits: Tensor, requests: int) -> dict[str, Any]:
        """The most probable tokens of rows ``[requests * S, V]``, as keyword arguments of ``next_tree_``."""
        tokens, scores = self._draw(logits, self._shortlist, mode="top")
        left, right = self.transition or (None, None)
        shape = requests, -1, self._shortlist
        return {"offered": tokens.view(shape), "scores": scores.view(shape), "left": left, "right": right}

    def of_rows(
        self, logits: Tensor, positions: Tensor | None, sampling: BatchSampling, requests: int
    ) -> dict[str, Tensor]:
        """The offered tokens, as keyword arguments of ``next_rows_``.

        Args:
            logits: ``[requests * S, V]``, of S look-ahead rows of each request.
            positions: ``[requests * S]`` int64, text positions of the tokens that these rows foresee; None if not ``draws``.
            sampling: one for each of the rows.
        """
        if self.transition is None:  # every parent of a level has the same candidates: the best, in order
            law = sampling.keywords()
            tokens, _ = self._draw(logits, self.count, mode="coupled", positions=positions, **law)
            return {"offered": tokens.view(requests, -1, self.count)}
        tokens, scores = self._draw(logits, self.count, mode="top")
        left, right = self.transition
        shape = requests, -1, self.count
        return {"offered": tokens.view(shape), "scores": scores.view(shape), "left": left, "right": right}


class TreeFiller:
    """Fills a tree of candidates from the logits of look-ahead slots.

    Args:
        lookahead: the embeddings.
        tree: of candidates.
        table: the model's input embeddings.
        sampling: of the batch.
        rule: how the candidates will be judged.
        shards: the ranks that hold the columns of the slots' logits; None: this process has all.
        guides: the grammars of the texts; None: none has one.
        has_probabilities: tell those of the candidates, in mode "coupled" without a grammar.
    """

    def __init__(
        self,
        lookahead: LookaheadEmbedding,
        tree: Tree,
        table: Tensor,
        sampling: BatchSampling,
        rule: str,
        shards: LogitShards | None = None,
        guides: Guides | None = None,
        has_probabilities: bool = False,
    ) -> None:
        self.tree, self._has_probabilities = tree, has_probabilities
        self.offers = Offers(lookahead, tree, table, shards)
        self._sampling, self._shards, self._guides = sampling, shards, guides
        self._mode = drawing_mode(sampling, rule)
        self._are_judged_by_logits = are_judged_by_logits(sampling, rule)
        self._levels = levels_of(tree, table.device)
        # Under a grammar the best tokens may all be forbidden.
        transition = self.offers.transition if guides is None else None
        self._short = None if transition is None else ShortRows(*transition, self.offers.count)
        self._parents = torch.tensor(tree.parents, dtype=torch.int32, device=table.device)
        # Of the candidates, nodes 1, 2, …
        self._above = self._parents[1:].long()
        self._slot_of = torch.tensor([depth - 1 for depth in tree.depths[1:]], device=table.device)

    def fill(self, slots: Tensor, requests: Sequence[int], roots: Sequence[int], positions: Sequence[int]) -> Filled:
        """Fills the trees of these requests.

        Args:
            slots: ``[len(requests), L, V]``, logits of their look-ahead groups, slot 0 first.
            requests: their numbers.
            roots: the tokens of their next roots.
            positions: the text positions of these roots.
        """
        device = slots.device
        sampling = self._sampling.of_requests(torch.tensor(requests, device=device))
        places = torch.tensor(positions, device=device)
        if self._mode == "coupled" and self._guides is None:
            tokens, offered = self._offered(slots, roots, sampling, places)
            shares = self._probabilities(slots, tokens, offered).tolist() if self._has_probabilities else None
            return Filled(tokens[:, 1:].tolist(), None, None, None, shares)
        if self._shards is not None:
            slots = self._shards.whole(slots)
        # The extra entry `num_nodes` takes the surplus candidates of parents with fewer children.
        tokens = torch.full((len(requests), self.tree.num_nodes + 1), -1, device=device)
        tokens[:, 0] = torch.tensor(roots, device=device)
        return self._drawn(slots, requests, tokens, sampling, places)

    def _probabilities(self, slots: Tensor, tokens: Tensor, offered: dict[str, Tensor]) -> Tensor:
        """``[n, nodes - 1]``: each token's probability by its slot and, where the embeddings have them, transition scores
        among the offered tokens; 0 where there is no token."""
        nodes = tokens[:, 1:]
        if self.offers.transition is None:
            totals = slots[:, : self.tree.max_depth].float().logsumexp(-1).index_select(1, self._slot_of)
            known = slots[:, self._slot_of].gather(2, nodes.clamp(min=0)[..., None])[..., 0].float()
            return (known - totals).exp().where(nodes >= 0, 0)
        left, right = self.offers.transition
        before = embedding(tokens.index_select(1, self._above).clamp(min=0), left)
        choices, scores = (offered[name].index_select(1, self._slot_of) for name in ("offered", "scores"))
        # Request by request, and without softmax or a product of matrices: see _rows_of.
        shifts = [(embedding(c, right) * b[:, None]).sum(-1) for c, b in zip(choices.clamp(min=0), before, strict=True)]
        shifted = scores + torch.stack(shifts)
        weights = (shifted - shifted.amax(-1, keepdim=True)).exp()
        shares = weights.where(choices == nodes[..., None], 0).sum(-1) / weights.sum(-1)
        return (shares * scores.exp().sum(-1)).where(nodes >= 0, 0)

    def _offered(
        self, slots: Tensor, roots: Sequence[int], sampling: BatchSampling, places: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The best of the offered tokens below every parent, ``[n, nodes]`` with the roots, and what was offered:
        ``next_rows_`` moves each request to its root."""
        requests, nodes, depth = len(roots), self.tree.num_nodes, self.tree.max_depth
        at = (places[:, None] + torch.arange(1, depth + 1, device=places.device)).flatten()
        offered = self.offers.of_rows(slots[:, :depth].flatten(0, 1), at, sampling.repeated(depth), requests)
        rows = places.new_full((3, requests, nodes), -1)
        zeros = places.new_zeros(requests, dtype=torch.int32)
        next_rows_(
            rows,
            places.clone(),
            zeros.clone(),
            places.new_empty(requests, 4),
            limits=places + 9,  # far behind the root
            parents=self._parents,
            nodes=nodes,
            emitted=torch.tensor(roots, device=places.device)[:, None],
            path=zeros[:, None],
            num_accepted=zeros,
            status=zeros,
            groups=zeros[:1],
            **offered,
            **sampling.keywords(),
        )
        return rows[1], offered

    def _drawn(
        self, slots: Tensor, requests: Sequence[int], tokens: Tensor, sampling: BatchSampling, places: Tensor
    ) -> Filled:
        """Draws separately below every parent, under its mask, and keeps the logits of the draws for rules that need them."""
        if self._short is not None:
            self._short.begin(
                slots[:, : self.tree.max_depth], len(slots) * sum(len(level.numbers) for level in self._levels)
            )
        drawn_from: list[Tensor] = []
        drawn_under: list[Tensor] = []
        rows = torch.full((len(slots), self.tree.num_nodes), -1, device=slots.device)
        first = 0
        for i, level in enumerate(self._levels):
            count, width = level.children.shape
            logits = self._logits_below(slots, i, tokens[:, level.parents].clamp(min=0))
            allowed = None
            if self._guides is not None:
                allowed = self._guides.below(self.tree, requests, tokens.tolist(), level.numbers)
                drawn_under.append(allowed)
            best, _ = draw_children(logits, width, self._mode, sampling, places, i + 1, level.parents, allowed=allowed)
            tokens[:, level.children] = best.view(-1, count, width)
            rows[:, level.parents] = first + torch.arange(len(logits), device=slots.device).view(-1, count)
            first += len(logits)
            drawn_from.append(logits)
        filled = tokens[:, 1 : self.tree.num_nodes].tolist()
        if not self._are_judged_by_logits:
            return Filled(filled, None, None)
        whole = torch.cat(drawn_from) if self._short is None else self._short.rows
        return Filled(filled, whole, rows.tolist(), torch.cat(drawn_under) if drawn_under else None)

    def _logits_below(self, slots: Tensor, slot: int, parents: Tensor) -> Tensor:
        """``[n * P, V]``, the logits of a slot below tokens ``parents`` [n, P]."""
        if self._short is not None:
            return self._short.below(slot, parents)
        logits = slots[:, slot, None].expand(-1, parents.shape[1], -1)
        if self.offers.transition is not None:
            left, right = self.offers.transition
            logits = logits + left[parents] @ right.t()
        return logits.flatten(0, 1).contiguous()


def _rows_of(logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """``[n, L, V]``, copies of these rows. On the CPU row by row, in words: for larger pieces torch takes its threads, which
    spin on beside those of the model's layers, and a step of 13 ms then takes 20."""
    words = 8 // logits.element_size()
    if logits.device.type != "cpu" or logits.shape[-1] % words or not logits.is_contiguous():
        return logits[torch.tensor(rows, device=logits.device)]
    copies = logits.new_empty(len(rows), len(rows[0]), logits.shape[-1])
    source, target = logits.view(torch.int64), copies.view(torch.int64)
    for b, group in enumerate(rows):
        for i, row in enumerate(group):
            target[b, i] = source[row]
    return copies


def _transition_tables(
    lookahead: LookaheadEmbedding, table: Tensor, shards: LogitShards | None
) -> tuple[Tensor, Tensor]:
    """The transition tables. Computing them costs more than a step, so they are cached until one of their inputs changes."""
    if shards is not None and shards.table_part is not None:
        # Not cached: ranks that disagreed about a change would wait for each other.
        parts = lookahead.transition_tables(shards.table_part)
        return shards.whole_rows(parts[0]), shards.whole_rows(parts[1])
    left, right = lookahead.transition_left, lookahead.transition_right
    inputs = [x for x in (table, left, right) if x is not None]
    if any(x.is_inference() for x in inputs):  # inference tensors have no version to notice a change by
        return lookahead.transition_tables(table)
    versions = tuple((x.data_ptr(), x._version, x.dtype) for x in inputs)
    cached = _tables.get(lookahead)
    if cached is None or cached[0] != versions:
        cached = _tables[lookahead] = (versions, lookahead.transition_tables(table))
    return cached[1]

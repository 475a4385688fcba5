"""``TreeFiller``: fills a tree of candidates from the logits of look-ahead slots; child k of a node is its candidate of rank k.

With rule "coupled" candidates are the best under the target's own noise; for rules that need the drafts' distribution q they
are drawn from it, and q's logits are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from pass_ext.decoding.drafting.candidates import are_judged_by_logits, draw_children, drawing_mode, levels_of
from pass_ext.decoding.drafting.lookahead.recall import Recall
from pass_ext.decoding.drafting.lookahead.short_rows import ShortRows
from pass_ext.decoding.drafting.lookahead.slot_tokens import SlotTokens
from pass_ext.decoding.models.vocabulary import LogitShards
from pass_ext.decoding.requests.guides import Guides
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.next import next_rows_
from pass_ext.tree import Tree


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
        has_probabilities: tell those of the candidates, in mode "coupled".
        recalls: tokens that the text recalls rise.
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
        recalls: bool = False,
    ) -> None:
        self.tree, self._has_probabilities = tree, has_probabilities
        self.offers = SlotTokens(lookahead, tree, table, shards, recalls=recalls)
        self._sampling, self._shards, self._guides = sampling, shards, guides
        self._mode = drawing_mode(sampling, rule)
        self._are_judged_by_logits = are_judged_by_logits(sampling, rule)
        self._levels = levels_of(tree, table.device)
        self._recall = Recall(tree, table.device) if self.offers.recalls else None
        has_short = self.offers.are_scored or guides is not None
        self._short = ShortRows(self.offers.transition, self.offers.shortlist) if has_short else None
        self._parents = torch.tensor(tree.parents, dtype=torch.int32, device=table.device)
        # Of the candidates, nodes 1, 2, …
        self._above = self._parents[1:].long()
        self._slot_of = torch.tensor([depth - 1 for depth in tree.depths[1:]], device=table.device)

    def fill(
        self,
        slots: Tensor,
        requests: Sequence[int],
        roots: Sequence[int],
        positions: Sequence[int],
        text: Tensor | None = None,
    ) -> Filled:
        """Fills the trees of these requests.

        Args:
            slots: ``[len(requests), L, V]``, logits of their look-ahead groups, slot 0 first.
            requests: their numbers.
            roots: the tokens of their next roots.
            positions: the text positions of these roots.
            text: ``[len(requests), T]`` int64, the texts, these roots included; needed where they are recalled.
        """
        device = slots.device
        sampling = self._sampling.of_requests(torch.tensor(requests, device=device))
        places = torch.tensor(positions, device=device)
        if self._recall is not None:
            if text is None:
                raise ValueError("TreeFiller: text must be given where it is recalled, got None")
            self._recall.begin(text, places + 1)
        if self._mode == "coupled" and self._guides is None:
            tokens, offered = self._offered(slots, roots, sampling, places, text)
            shares = self._probabilities(slots, tokens, offered).tolist() if self._has_probabilities else None
            return Filled(tokens[:, 1:].tolist(), None, None, None, shares)
        if self._shards is not None:
            slots = self._shards.whole(slots)
        # The extra entry `num_nodes` takes the surplus candidates of parents with fewer children.
        tokens = torch.full((len(requests), self.tree.num_nodes + 1), -1, device=device)
        tokens[:, 0] = torch.tensor(roots, device=device)
        return self._drawn(slots, requests, tokens, sampling, places)

    def _probabilities(self, slots: Tensor, tokens: Tensor, offered: dict[str, Any]) -> Tensor:
        """``[n, nodes - 1]``: each token's probability by its slot, and by the scores among the offered tokens where there are
        some; 0 where there is no token."""
        nodes = tokens[:, 1:]
        if not self.offers.are_scored:
            totals = slots[:, : self.tree.max_depth].float().logsumexp(-1).index_select(1, self._slot_of)
            known = slots[:, self._slot_of].gather(2, nodes.clamp(min=0)[..., None])[..., 0].float()
            return (known - totals).exp().where(nodes >= 0, 0)
        choices, scores = (offered[name].index_select(1, self._slot_of) for name in ("offered", "scores"))
        shifted = scores
        if self.offers.transition is not None:
            left, right = self.offers.transition
            before = embedding(tokens.index_select(1, self._above).clamp(min=0), left)
            # Request by request, and without softmax or a product of matrices: see rows_of.
            pairs = zip(choices.clamp(min=0), before, strict=True)
            shifted = scores + torch.stack([(embedding(c, right) * b[:, None]).sum(-1) for c, b in pairs])
        if self._recall is not None:
            shifted = shifted + self._recall.below(self._above, tokens, choices)
        weights = (shifted - shifted.amax(-1, keepdim=True)).exp()
        shares = weights.where(choices == nodes[..., None], 0).sum(-1) / weights.sum(-1)
        return (shares * scores.exp().sum(-1)).where(nodes >= 0, 0)

    def _offered(
        self, slots: Tensor, roots: Sequence[int], sampling: BatchSampling, places: Tensor, text: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
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
            text=text if self.offers.recalls else None,
            **offered,
            **sampling.keywords(),
        )
        return rows[1], offered

    def _drawn(
        self,
        slots: Tensor,
        requests: Sequence[int],
        tokens: Tensor,
        sampling: BatchSampling,
        places: Tensor,
    ) -> Filled:
        """Draws separately below every parent, under its mask, and keeps the logits of the draws for rules that need them."""
        if self._short is not None:
            parents = sum(len(level.numbers) for level in self._levels)
            masked = self._guides is not None
            self._short.begin(slots[:, : self.tree.max_depth], len(slots) * parents, masked=masked)
        drawn_from: list[Tensor] = []
        drawn_under: list[Tensor] = []
        # As `tokens`.
        shares = torch.zeros(tokens.shape, device=slots.device)
        rows = torch.full((len(slots), self.tree.num_nodes), -1, device=slots.device)
        first = 0
        for i, level in enumerate(self._levels):
            count, width = level.children.shape
            allowed = None
            if self._guides is not None:
                allowed = self._guides.below(self.tree, requests, tokens.tolist(), level.numbers)
                drawn_under.append(allowed)
            logits = self._logits_below(slots, i, level.parents, tokens, allowed)
            best, _ = draw_children(logits, width, self._mode, sampling, places, i + 1, level.parents, allowed=allowed)
            tokens[:, level.children] = best.view(-1, count, width)
            if self._has_probabilities and self._short is not None:
                shares[:, level.children] = self._short.shares(best).view(-1, count, width)
            rows[:, level.parents] = first + torch.arange(len(logits), device=slots.device).view(-1, count)
            first += len(logits)
            drawn_from.append(logits)
        filled = tokens[:, 1 : self.tree.num_nodes].tolist()
        if not self._are_judged_by_logits:
            probabilities = shares[:, 1 : self.tree.num_nodes].tolist() if self._has_probabilities else None
            return Filled(filled, None, None, None, probabilities)
        whole = torch.cat(drawn_from) if self._short is None else self._short.rows
        return Filled(filled, whole, rows.tolist(), torch.cat(drawn_under) if drawn_under else None)

    def _logits_below(self, slots: Tensor, slot: int, nodes: Tensor, tokens: Tensor, allowed: Tensor | None) -> Tensor:
        """``[n * P, V]``, the logits of a slot below nodes [P] of the tree, whose tokens are ``tokens`` [n, nodes + 1]."""
        if self._short is None:
            return slots[:, slot, None].expand(-1, len(nodes), -1).flatten(0, 1).contiguous()
        recalled = None if self._recall is None else partial(self._recall.below, nodes, tokens)
        return self._short.below(slot, tokens[:, nodes].clamp(min=0), recalled, allowed)

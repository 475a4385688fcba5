"""The tokens that look-ahead slots offer as candidates.

``SlotTokens``: for the op that puts them into a tree (csrc/core/next_tree.h). Slot i's logits rank the candidates at depth
i + 1 below each parent, with transition scores left[parent] · right[token] where the embeddings have them; and tokens that the
text recalls rise (csrc/core/recall.h). The scores reorder a shortlist of the most probable tokens of each slot.

``TreeFiller``: fills a given tree; child k of a node is its candidate of rank k. With rule "coupled" these are the best under
the target's own noise. For rules that need the drafts' distribution q they are drawn from it, and q's logits are kept:

    logits[row, token] = log probability by the slot + left[parent's token] · right[token] + recall of the token,
                         -inf for all tokens that are not in the shortlist
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import embedding

from pass_ext.decoding.drafting.candidates import (
    Candidates,
    Groups,
    Level,
    Proposal,
    are_verified_by_logits,
    draw_children,
    drawing_mode,
    levels_of,
)
from pass_ext.decoding.models.vocabulary import LogitShards
from pass_ext.decoding.requests.guides import Guides
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.common.uploaded import sent, uploaded
from pass_ext.ops.draft import draft_sample
from pass_ext.ops.next import MAX_CHOSEN_ROWS, REPORT_NUMBERS, next_tree_
from pass_ext.ops.recall import RECALL_TOKENS, recall_scores
from pass_ext.tree import Tree

_SHORTLIST = 64  # candidates of a slot that scores reorder, or more where a node has more children
_tables: MutableMapping[LookaheadEmbedding, tuple[Any, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


class SlotTokens:
    """The tokens that look-ahead rows offer, in mode "coupled".

    Args:
        tree: of candidates.
        table: the model's input embeddings.
        shards: the ranks that hold the columns of the logits; None: this process has all.
        recalls: tokens that the text recalls rise.
        stored: the table's numbers where ``table`` has none, packed; None: those of ``table``.
    """

    def __init__(
        self,
        lookahead: LookaheadEmbedding,
        tree: Tree,
        table: Tensor,
        shards: LogitShards | None,
        *,
        recalls: bool,
        stored: Tensor | None = None,
    ) -> None:
        self._draw = draft_sample if shards is None else shards.draft_sample
        numbers = table if stored is None else stored
        tables = transition_tables(lookahead, numbers, shards) if lookahead.rank else None
        tokens = table.shape[0]
        self.transition = None if tables is None else (tables[0].detach()[:tokens], tables[1].detach()[:tokens])
        self.recalls = recalls
        widest = max(len(tree.children(node)) for node in range(tree.num_nodes))
        self.shortlist = min(max(_SHORTLIST, widest), table.shape[0])
        """How many tokens of a slot are reordered."""

    @property
    def are_scored(self) -> bool:
        """True: a slot's tokens are reordered below each parent."""
        return self.transition is not None or self.recalls

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for offers that read the same memory."""
        return (self.shortlist, self.recalls, *(table.data_ptr() for table in self.transition or ()))

    def top_of_rows(self, logits: Tensor, requests: int, allowed: Tensor | None = None) -> dict[str, Any]:
        """The most probable tokens of rows ``[requests * S, V]``, as keyword arguments of ``next_tree_``.

        allowed: ``[requests * S, ceil(V / 32)]`` int32 words, the tokens that a grammar allows; None: all.
        """
        tokens, scores = self._draw(logits, self.shortlist, mode="top", allowed=allowed)
        left, right = self.transition or (None, None)
        shape = requests, -1, self.shortlist
        return {"offered": tokens.view(shape), "scores": scores.view(shape), "left": left, "right": right}


class TreeFiller:
    """Fills a tree of candidates from the logits of look-ahead slots.

    Args:
        lookahead, tree, table, shards, recalls, stored: as for ``SlotTokens``.
        sampling, rule: of the generation.
        guides: the grammars of the texts; None: none has one.
        groups: of the candidates.
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
        groups: Groups = (),
        *,
        recalls: bool = False,
        stored: Tensor | None = None,
    ) -> None:
        self.tree, self._groups = tree, groups
        self.offers = SlotTokens(lookahead, tree, table, shards, recalls=recalls, stored=stored)
        self._sampling, self._shards, self._guides = sampling, shards, guides
        self._mode = drawing_mode(sampling, rule)
        self._are_verified_by_logits = are_verified_by_logits(sampling, rule)
        self._levels = levels_of(tree, table.device)
        self._by_op = self._mode == "coupled" and tree.num_nodes + tree.max_depth <= MAX_CHOSEN_ROWS
        if self._by_op:
            whole = tree.with_lookahead({0: tree.max_depth})
            self._ids = whole.ids([0] * tree.num_nodes).to(table.device)
            self._parents = uploaded(whole.parents, table.device, torch.int32)
        self._rows: Tensor | None = None  # of the last fill, whose memory is used again
        self._held: list[Tensor] = []  # the tokens that they hold, level by level

    def fill(
        self,
        slots: Tensor,
        requests: Sequence[int],
        roots: Sequence[int],
        positions: Sequence[int],
        text: Tensor | None = None,
    ) -> Proposal:
        """The candidates of these requests. Logits hold until the next fill.

        Args:
            slots: ``[len(requests), L, V]``, logits of their look-ahead groups, slot 0 first.
            roots, positions: the tokens and text positions of their next roots.
            text: ``[len(requests), T]`` int64, the texts, these roots included; needed where they are recalled.
        """
        if text is None and self.offers.recalls:
            raise ValueError("TreeFiller: text must be given where it is recalled, got None")
        text = text if self.offers.recalls else None
        places = uploaded(positions, slots.device)
        if self._by_op:
            return self._best(slots, requests, roots, places, text)
        if self._shards is not None:
            slots = self._shards.whole(slots)
        return self._drawn(slots, requests, roots, places, text)

    def _best(
        self, slots: Tensor, requests: Sequence[int], roots: Sequence[int], places: Tensor, text: Tensor | None
    ) -> Proposal:
        """The best of the offered tokens below every parent: ``next_tree_`` moves each request to its root. Under a grammar the
        first level has tokens that it allows; deeper ones that it forbids are left out where all drafters' candidates meet."""
        count, nodes, depth = len(roots), self.tree.num_nodes, self.tree.max_depth
        logits, allowed = slots[:, :depth].flatten(0, 1), None
        if self._guides is not None:
            masks = self._guides.below(Tree.chain(0), requests, [[root] for root in roots], [0])
            allowed = masks.new_full((len(logits), masks.shape[1]), -1)
            allowed[::depth] = masks
        # For the op the step before was the tree, with the slots that predict it after its root.
        rows = torch.stack([self._ids] * 3)[:, None].repeat(1, count, 1)
        zeros = places.new_zeros(count, dtype=torch.int32)
        next_tree_(
            rows,
            self._parents.repeat(count, 1),
            places.clone(),
            zeros.clone(),
            places.new_empty(count, REPORT_NUMBERS + 1),
            limits=places + depth + 2,
            emitted=uploaded(roots, places.device)[:, None],
            path=zeros[:, None],
            num_accepted=zeros,
            status=zeros,
            text=text,
            first=nodes,
            **self.offers.top_of_rows(logits, count, allowed),
            **self._sampling.of_requests(places.new_tensor(requests)).keywords(),
        )
        return Proposal([Candidates(self.tree, own, groups=self._groups) for own in rows[1, :, 1:nodes].tolist()])

    def _drawn(
        self, slots: Tensor, requests: Sequence[int], roots: Sequence[int], places: Tensor, text: Tensor | None
    ) -> Proposal:
        """Draws separately below every parent, under its mask, and keeps the logits of the draws for rules that need them."""
        device, nodes = slots.device, self.tree.num_nodes
        sampling = self._sampling.of_requests(places.new_tensor(requests))
        # The extra entry `nodes` takes the surplus candidates of parents with fewer children.
        tokens = torch.full((len(requests), nodes + 1), -1, device=device)
        tokens[:, 0] = uploaded(roots, device)
        paths = None if text is None else _last_tokens(text, places)[:, None].repeat(1, nodes + 1, 1)
        whole = self._empty_rows(slots)
        drawn_under: list[Tensor] = []
        rows = torch.full((len(slots), nodes), -1, device=device)
        first = 0
        for i, level in enumerate(self._levels):
            count, width = level.children.shape
            allowed = None
            if self._guides is not None:
                allowed = self._guides.below(self.tree, requests, tokens.tolist(), level.numbers)
                drawn_under.append(allowed)
            logits = whole[first : first + len(slots) * count]
            if self.offers.are_scored:
                recalled = None if text is None or paths is None else (text, places, paths[:, level.parents])
                held, scores = self._scored(slots[:, i], tokens[:, level.parents], recalled, allowed)
                self._held.append(held)
                logits.scatter_(1, held, scores)
            else:
                logits.view(len(slots), count, -1).copy_(slots[:, i, None])
            best, _ = draw_children(logits, width, self._mode, sampling, places, i + 1, level.parents, allowed=allowed)
            tokens[:, level.children] = best.view(-1, count, width)
            if paths is not None:
                paths = _with_children(paths, tokens, level)
            rows[:, level.parents] = first + torch.arange(len(logits), device=device).view(-1, count)
            first += len(logits)
        filled = tokens[:, 1:nodes].tolist()
        if not self._are_verified_by_logits:
            return Proposal([Candidates(self.tree, own, groups=self._groups) for own in filled])
        each = zip(filled, rows.tolist(), strict=True)
        candidates = [Candidates(self.tree, own, draft_rows, self._groups) for own, draft_rows in each]
        return Proposal(candidates, whole, torch.cat(drawn_under) if drawn_under else None)

    def _empty_rows(self, slots: Tensor) -> Tensor:
        """``[R, V]``, a row for each parent; of -inf where they will be scored. Filling memory anew would take torch's threads,
        which spin on beside those of the model's layers."""
        dtype = torch.float32 if self.offers.are_scored else slots.dtype
        shape = len(slots) * sum(len(level.numbers) for level in self._levels), slots.shape[-1]
        if self._rows is None or self._rows.shape != shape or self._rows.dtype != dtype:
            self._rows = slots.new_full(shape, -torch.inf, dtype=dtype)
        elif self._held:
            first = 0
            for held in self._held:
                self._rows[first : first + len(held)].scatter_(1, held, -torch.inf)
                first += len(held)
        self._held = []
        return self._rows

    def _scored(
        self, slots: Tensor, parents: Tensor, recalled: tuple[Tensor, Tensor, Tensor] | None, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``[n * P, K]`` each, the shortlist of a slot below these parents, and its scores.

        Args:
            slots: ``[n, V]``, the slot's logits.
            parents: ``[n, P]``, the tokens of the parents.
            recalled: the texts ``[n, T]``, the roots' places ``[n]``, and the last tokens of each path ``[n, P, 3]``.
            allowed: ``[n * P, ceil(V / 32)]``, the masks below the parents.
        """
        requests, count = parents.shape
        masks = [None] if allowed is None else allowed.view(requests, count, -1).unbind(1)
        found = [
            draft_sample(slots, self.offers.shortlist, mode="top", allowed=None if mask is None else mask.contiguous())
            for mask in masks
        ]
        tokens, scores = (torch.stack(each, 1).expand(-1, count, -1).flatten(0, 1) for each in zip(*found, strict=True))
        # Where there are fewer tokens the best one stands again.
        is_there = tokens >= 0
        tokens, scores = tokens.where(is_there, tokens[:, :1]).clamp(min=0), scores.where(is_there, scores[:, :1])
        if self.offers.transition is not None:
            # Not by a product of matrices, for which torch would take its threads.
            left, right = self.offers.transition
            before = embedding(parents.flatten().clamp(min=0), left)
            scores = scores + (embedding(tokens, right) * before[:, None]).sum(-1)
        if recalled is not None:
            text, places, paths = recalled
            of = torch.arange(requests, dtype=torch.int32, device=tokens.device).repeat_interleave(count)
            scores = scores + recall_scores(tokens, paths.flatten(0, 1).contiguous(), of, text, places + 1)
        return tokens, scores


def _last_tokens(text: Tensor, places: Tensor) -> Tensor:
    """``[n, 3]``, the last tokens of each text up to its root; -1 in front of a text."""
    at = places[:, None] - torch.arange(RECALL_TOKENS - 1, -1, -1, device=text.device)
    return text.gather(1, at.clamp(min=0)).where(at >= 0, -1)


def _with_children(paths: Tensor, tokens: Tensor, level: Level) -> Tensor:
    """The last tokens of each node's path, ``[n, nodes + 1, 3]``, with those of this level's children."""
    above = paths[:, level.parents, None, 1:].expand(-1, -1, level.children.shape[1], -1)
    paths[:, level.children] = torch.cat([above, tokens[:, level.children, None]], -1)
    return paths


class GrowingTexts:
    """The texts of a batch as one tensor, ``[B, T]``, to which each step adds the new tokens. device: where they are wanted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = torch.empty(0, 0, dtype=torch.int64)
        self._known: list[int] = []

    def of(self, texts: Sequence[Sequence[int]], requests: Sequence[int]) -> Tensor:
        """``[len(requests), T]`` of these requests, T the longest text. texts: of all requests; they only grow."""
        longest = max(map(len, texts))
        if longest > self._rows.shape[1]:
            self._rows, self._known = torch.zeros(len(texts), 2 * longest, dtype=torch.int64), [0] * len(texts)
        for b, text in enumerate(texts):
            if len(text) > self._known[b]:
                self._rows[b, self._known[b] : len(text)] = torch.tensor(text[self._known[b] :])
                self._known[b] = len(text)
        return sent(self._rows[list(requests), :longest], self._device)


def transition_tables(
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


def rows_of(logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """``[n, L, V]``, copies of these rows. On the CPU row by row, in words: for larger pieces torch takes its threads, which
    spin on beside those of the model's layers, and a step of 13 ms then takes 20."""
    words = 8 // logits.element_size()
    if logits.device.type != "cpu" or logits.shape[-1] % words or not logits.is_contiguous():
        return logits[uploaded(rows, logits.device)]
    copies = logits.new_empty(len(rows), len(rows[0]), logits.shape[-1])
    source, target = logits.view(torch.int64), copies.view(torch.int64)
    for b, group in enumerate(rows):
        for i, row in enumerate(group):
            target[b, i] = source[row]
    return copies

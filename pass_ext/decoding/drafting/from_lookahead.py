"""``PassDrafter``: from the logits of a group of look-ahead slots to the candidates of the next step's tree.

Slot i's logits, plus transition scores left[parent] · right[token] where the embeddings have them, rank the candidates at depth
i + 1 below each parent; child k of a node is its candidate of rank k. Sampled with rule "coupled", candidates hear the target's
own noise; for rules that ask for the drafts' law q they are drawn from it, and q is kept.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from pass_ext.decoding.drafting.levels import draw_children, drawing_mode, levels_of, repeated
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.draft import draft_sample
from pass_ext.tree import Tree

_SHORTLIST = 64  # candidates of a slot that transition scores reorder, or more where a node has more children
_tables: MutableMapping[LookaheadEmbedding, tuple[Any, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


class Candidates(NamedTuple):
    """Drafted tokens of some requests."""

    tokens: list[list[int]]
    """For each of them the tokens of nodes 1, 2, …; -1: none."""
    logits: Tensor | None
    """``[R, V]``, the law that they were drawn from, for rules that ask for it."""
    rows: list[list[int]] | None
    """For each request and node the row of ``logits`` that its children were drawn from, or -1."""


class PassDrafter:
    """See the module.

    Args:
        lookahead: the embeddings.
        tree: of candidates; only its nodes count.
        table: the model's input embeddings.
        sampling: of the batch.
        rule: how the candidates will be judged.
    """

    def __init__(
        self, lookahead: LookaheadEmbedding, tree: Tree, table: Tensor, sampling: BatchSampling, rule: str
    ) -> None:
        self.tree = tree
        self._sampling = sampling
        self._mode = drawing_mode(sampling, rule)
        self._levels = levels_of(tree, table.device)
        self._transition = _transition_tables(lookahead, table) if lookahead.rank else None

    def draft(
        self, slots: Tensor, requests: Sequence[int], roots: Sequence[int], positions: Sequence[int]
    ) -> Candidates:
        """Candidates for the requests with these numbers, whose next roots stand at these text positions.

        slots ``[len(requests), L, V]``: logits of their look-ahead groups, slot 0 first.
        """
        device = slots.device
        chosen = torch.tensor(requests, device=device)
        law = {name: None if v is None else v[chosen] for name, v in self._sampling.law().items()}
        places = torch.tensor(positions, device=device)
        # Column `num_nodes` takes what parents with fewer children are offered beyond them.
        tokens = torch.full((len(requests), self.tree.num_nodes + 1), -1, device=device)
        tokens[:, 0] = torch.tensor(roots, device=device)
        if self._mode != "coupled":
            return self._drawn(slots, tokens, law, places)
        if self._transition is None:
            self._ranked(slots, tokens, law, places)
        else:
            self._reordered(slots, tokens, law, places)
        return Candidates(tokens[:, 1 : self.tree.num_nodes].tolist(), None, None)

    def _ranked(self, slots: Tensor, tokens: Tensor, law: dict[str, Any], places: Tensor) -> None:
        """The slots' own order: the same candidates below every parent of a level."""
        depth, most = len(self._levels), max(level.children.shape[1] for level in self._levels)
        rows = slots[:, :depth].flatten(0, 1)
        at = (places[:, None] + torch.arange(1, depth + 1, device=places.device)).flatten()
        best, _ = draft_sample(rows, most, mode="coupled", positions=at, **repeated(law, depth))
        for i, level in enumerate(self._levels):
            offered = best.view(-1, depth, most)[:, i, None, : level.children.shape[1]]
            tokens[:, level.children] = offered.expand(-1, len(level.parents), -1)

    def _reordered(self, slots: Tensor, tokens: Tensor, law: dict[str, Any], places: Tensor) -> None:
        """The best of each slot, in another order below each parent."""
        assert self._transition is not None
        left, right = self._transition
        depth, vocabulary = len(self._levels), slots.shape[-1]
        most = max(_SHORTLIST, *(level.children.shape[1] for level in self._levels))
        short, scores = draft_sample(slots[:, :depth].flatten(0, 1), min(most, vocabulary), mode="top")
        short, scores = (x.view(len(slots), depth, -1) for x in (short, scores))
        near = right[short.clamp(min=0)]  # [requests, depth, shortlist, r]
        for i, level in enumerate(self._levels):
            before = left[tokens[:, level.parents].clamp(min=0)]  # [requests, P, r]
            both = torch.baddbmm(scores[:, i, None], before, near[:, i].transpose(1, 2))  # [requests, P, shortlist]
            width = level.children.shape[1]
            among = short[:, i, None].expand_as(both)
            if law["temperature"] is None:
                best = among.gather(2, both.topk(min(width, both.shape[2])).indices)
                tokens[:, level.children] = pad(best, (0, width - best.shape[2]), value=-1)
                continue
            rows = both.new_full((*both.shape[:2], vocabulary), float("-inf"))
            rows.scatter_(2, among.clamp(min=0), both)
            best, _ = draw_children(rows.flatten(0, 1), width, "coupled", law, places, i + 1, level.parents)
            tokens[:, level.children] = best.view(-1, len(level.parents), width)

    def _drawn(self, slots: Tensor, tokens: Tensor, law: dict[str, Any], places: Tensor) -> Candidates:
        """Draws for every parent of its own, from a law that is kept."""
        kept: list[Tensor] = []
        rows = torch.full((len(slots), self.tree.num_nodes), -1, device=slots.device)
        first = 0
        for i, level in enumerate(self._levels):
            count, width = level.children.shape
            logits = slots[:, i, None].expand(-1, count, -1)
            if self._transition is not None:
                left, right = self._transition
                logits = logits + left[tokens[:, level.parents].clamp(min=0)] @ right.t()
            logits = logits.flatten(0, 1).contiguous()
            best, _ = draw_children(logits, width, self._mode, law, places, i + 1, level.parents)
            tokens[:, level.children] = best.view(-1, count, width)
            rows[:, level.parents] = first + torch.arange(len(logits), device=slots.device).view(-1, count)
            first += len(logits)
            kept.append(logits)
        return Candidates(tokens[:, 1 : self.tree.num_nodes].tolist(), torch.cat(kept), rows.tolist())


def _transition_tables(lookahead: LookaheadEmbedding, table: Tensor) -> tuple[Tensor, Tensor]:
    """Kept while nothing of what they are made of changes: they cost more than a step."""
    left, right = lookahead.transition_left, lookahead.transition_right
    parts = [x for x in (table, left, right) if x is not None]
    if any(x.is_inference() for x in parts):  # nobody counts their changes
        return lookahead.transition_tables(table)
    made_of = tuple((x.data_ptr(), x._version, x.dtype) for x in parts)
    kept = _tables.get(lookahead)
    if kept is None or kept[0] != made_of:
        kept = _tables[lookahead] = (made_of, lookahead.transition_tables(table))
    return kept[1]

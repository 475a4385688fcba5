"""``SlotTokens``: the tokens that the rows of look-ahead slots offer as candidates, for ops that put them into a tree.

Slot i's logits, plus transition scores left[parent] · right[token] where the embeddings have them, rank the candidates at depth
i + 1 below each parent; and tokens that the text recalls rise (csrc/core/recall.h). The scores reorder a shortlist of the most
probable tokens of each slot.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from pass_ext.decoding.models.vocabulary import LogitShards
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.draft import draft_sample
from pass_ext.tree import Tree

_SHORTLIST = 64  # candidates of a slot that scores reorder, or more where a node has more children
_tables: MutableMapping[LookaheadEmbedding, tuple[Any, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


class SlotTokens:
    """What look-ahead rows offer, in mode "coupled".

    Args:
        lookahead: the embeddings.
        tree: of candidates.
        table: the model's input embeddings.
        shards: the ranks that hold the columns of the logits; None: this process has all.
        recalls: tokens that the text recalls rise.
    """

    def __init__(
        self,
        lookahead: LookaheadEmbedding,
        tree: Tree,
        table: Tensor,
        shards: LogitShards | None = None,
        *,
        recalls: bool = False,
    ) -> None:
        self._draw = draft_sample if shards is None else shards.draft_sample
        tables = transition_tables(lookahead, table, shards) if lookahead.rank else None
        self.transition = None if tables is None else (tables[0].detach(), tables[1].detach())
        self.recalls = recalls
        widest = max(len(tree.children(node)) for node in range(tree.num_nodes))
        self.shortlist = min(max(_SHORTLIST, widest), table.shape[0])
        """How many tokens of a slot scores reorder."""
        self.count = self.shortlist if self.are_scored else min(widest, table.shape[0])
        self.most = min(_SHORTLIST, table.shape[0])
        """How many tokens of a row ``top_of_rows`` gives."""

    @property
    def are_scored(self) -> bool:
        """True: what a slot offers is reordered below each parent."""
        return self.transition is not None or self.recalls

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for offers that read the same memory."""
        return (self.count, self.recalls, *(table.data_ptr() for table in self.transition or ()))

    def draws(self, sampling: BatchSampling) -> bool:
        """True: the offered tokens are drawn, by the noise of their positions."""
        return not self.are_scored and not sampling.is_greedy

    def top_of_rows(self, logits: Tensor, requests: int) -> dict[str, Any]:
        """The most probable tokens of rows ``[requests * S, V]``, as keyword arguments of ``next_tree_``."""
        tokens, scores = self._draw(logits, self.most, mode="top")
        left, right = self.transition or (None, None)
        shape = requests, -1, self.most
        return {"offered": tokens.view(shape), "scores": scores.view(shape), "left": left, "right": right}

    def of_rows(
        self, logits: Tensor, positions: Tensor | None, sampling: BatchSampling, requests: int
    ) -> dict[str, Any]:
        """The offered tokens, as keyword arguments of ``next_rows_``.

        Args:
            logits: ``[requests * S, V]``, of S look-ahead rows of each request.
            positions: ``[requests * S]`` int64, text positions of the tokens that these rows foresee; None if not ``draws``.
            sampling: one for each of the rows.
        """
        if not self.are_scored:  # every parent of a level has the same candidates: the best, in order
            law = sampling.keywords()
            tokens, _ = self._draw(logits, self.count, mode="coupled", positions=positions, **law)
            return {"offered": tokens.view(requests, -1, self.count)}
        tokens, scores = self._draw(logits, self.count, mode="top")
        left, right = self.transition or (None, None)
        shape = requests, -1, self.count
        return {"offered": tokens.view(shape), "scores": scores.view(shape), "left": left, "right": right}


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

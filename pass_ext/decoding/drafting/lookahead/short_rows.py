"""``ShortRows``: the rows of logits that candidates are drawn from below the parents of a tree, each with the most probable
tokens of its slot alone.

    logits[row, token] = log probability by the slot + left[parent's token] · right[token] + recall of the token,
                         -inf for all other tokens

Transition scores of a whole vocabulary would cost a product with the table of ``right`` below every parent; and on the CPU
torch would take its threads for it, which spin on beside those of the model's layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding

from pass_ext.ops.draft import draft_sample


class ShortRows:
    """Rows of one tree, in memory that is used again: those of a fill hold until the next one.

    Args:
        transition: left and right, ``[V, r]`` float32; None: there are no such scores.
        count: tokens of a row.
    """

    def __init__(self, transition: tuple[Tensor, Tensor] | None, count: int) -> None:
        self._transition, self._count = transition, count
        self._rows: Tensor | None = None
        self._places: list[tuple[int, Tensor]] = []  # (the first of some rows, the tokens that they hold)

    def begin(self, slots: Tensor, count: int) -> None:
        """Starts ``count`` rows in all. slots: ``[n, L, V]``, logits of the requests' look-ahead groups."""
        requests, depth, vocabulary = slots.shape
        tokens, scores = draft_sample(slots.flatten(0, 1), self._count, mode="top")
        # A slot may offer fewer: then its best stands again where there is none.
        is_there = tokens >= 0
        self._tokens = torch.where(is_there, tokens, tokens[:, :1]).clamp(min=0).view(requests, depth, -1)
        self._scores = torch.where(is_there, scores, scores[:, :1]).view(requests, depth, -1)
        if self._rows is None or self._rows.shape != (count, vocabulary):
            self._rows = slots.new_full((count, vocabulary), -torch.inf, dtype=torch.float32)
        else:
            for first, held in self._places:
                self._rows[first : first + len(held)].scatter_(1, held, -torch.inf)
        self._places, self._next = [], 0

    def below(self, slot: int, parents: Tensor, recalled: Callable[[Tensor], Tensor] | None) -> Tensor:
        """``[n * P, V]``, the next rows: of this slot below tokens ``parents`` [n, P].

        recalled(candidates [n, P, K]): what their scores rise by; None: by nothing."""
        assert self._rows is not None
        requests, count = parents.shape
        candidates = self._tokens[:, slot, None].expand(-1, count, -1)
        tokens = candidates.flatten(0, 1)
        scores = self._scores[:, slot, None].expand(-1, count, -1).flatten(0, 1)
        if self._transition is not None:
            # Not by a product of matrices, for which torch would take its threads.
            left, right = self._transition
            scores = scores + (embedding(tokens, right) * embedding(parents.flatten(), left)[:, None]).sum(-1)
        if recalled is not None:
            scores = scores + recalled(candidates).flatten(0, 1)
        first, self._next = self._next, self._next + requests * count
        self._places.append((first, tokens))
        return self._rows[first : self._next].scatter_(1, tokens, scores)

    @property
    def rows(self) -> Tensor:
        """All rows since ``begin``."""
        assert self._rows is not None
        return self._rows

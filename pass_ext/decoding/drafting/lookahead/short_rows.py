"""``ShortRows``: the rows of logits that candidates are drawn from below the parents of a tree, each with the most probable
tokens of its slot alone; under a grammar with the most probable of those that it allows there.

    logits[row, token] = log probability by the slot + left[parent's token] · right[token] + recall of the token,
                         -inf for all other tokens

Transition scores of a whole vocabulary would cost a product with the table of ``right`` below every parent; and on the CPU
torch would take its threads for it, which spin on beside those of the model's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    def begin(self, slots: Tensor, count: int, *, masked: bool) -> None:
        """Starts ``count`` rows in all.

        Args:
            slots: ``[n, L, V]``, logits of the requests' look-ahead groups.
            masked: True: each level comes with masks.
        """
        _, self._depth, vocabulary = slots.shape
        self._slots = slots.flatten(0, 1)
        self._free = None if masked else self._best(self._slots, None)
        if self._rows is None or self._rows.shape != (count, vocabulary):
            self._rows = slots.new_full((count, vocabulary), -torch.inf, dtype=torch.float32)
        else:
            for first, held in self._places:
                self._rows[first : first + len(held)].scatter_(1, held, -torch.inf)
        self._places, self._next = [], 0

    def below(
        self,
        slot: int,
        parents: Tensor,
        recalled: Callable[[Tensor], Tensor] | None,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """``[n * P, V]``, the next rows: of this slot below tokens ``parents`` [n, P].

        Args:
            recalled: ``recalled(candidates [n, P, K])``: what their scores rise by; None: by nothing.
            allowed: ``[n * P, ceil(V / 32)]`` int32 words, the tokens that a grammar allows there.
        """
        assert self._rows is not None
        requests, count = parents.shape
        each = [request * self._depth + slot for request in range(requests) for _ in range(count)]
        if self._free is None:
            tokens, known, is_there = self._best(rows_of(self._slots, [[row] for row in each])[:, 0], allowed)
        else:
            rows = torch.tensor(each, device=parents.device)
            tokens, known, is_there = (values.index_select(0, rows) for values in self._free)
        scores = known
        if self._transition is not None:
            # Not by a product of matrices, for which torch would take its threads.
            left, right = self._transition
            scores = scores + (embedding(tokens, right) * embedding(parents.flatten(), left)[:, None]).sum(-1)
        if recalled is not None:
            scores = scores + recalled(tokens.view(requests, count, -1)).flatten(0, 1)
        first, self._next = self._next, self._next + requests * count
        self._places.append((first, tokens))
        self._last = tokens, scores, known, is_there
        return self._rows[first : self._next].scatter_(1, tokens, scores)

    def shares(self, chosen: Tensor) -> Tensor:
        """``[n * P, K]``, the probabilities of these tokens in the last rows: what the slot gives all tokens of a row, shared
        by their scores. 0 for -1."""
        tokens, scores, known, is_there = self._last
        weights = (scores - scores.amax(-1, keepdim=True)).exp().where(is_there, 0)
        of_chosen = weights[:, None].where(chosen[:, :, None] == tokens[:, None], 0).sum(-1)
        share = of_chosen / weights.sum(-1, keepdim=True) * known.exp().where(is_there, 0).sum(-1, keepdim=True)
        return share.where(chosen >= 0, 0)

    @property
    def rows(self) -> Tensor:
        """All rows since ``begin``."""
        assert self._rows is not None
        return self._rows

    def _best(self, logits: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The best tokens of each row, their log probabilities, and which of them are there: a row may have fewer, then its
        best stands again where there is none."""
        tokens, scores = draft_sample(logits, self._count, mode="top", allowed=allowed)
        is_there = tokens >= 0
        tokens = torch.where(is_there, tokens, tokens[:, :1]).clamp(min=0)
        return tokens, torch.where(is_there, scores, scores[:, :1]), is_there


def rows_of(logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
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

"""``HeadCalls``: the calls of a head, whose rows have states, with caches that follow the texts.

    a level's call   the rows that are not in the caches, with the target's states; below the last of them the tree, each node
                     with the state that its parent's row gave in the call before
    after a step     commits the rows that had the target's states, and no others: those of accepted drafts are computed again,
                     from the states that the target has computed since

A head reads a text from its second token on: row j has token j + 1 and the target's state of token j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pass_ext.decoding.drafting.draft_calls import DraftCalls
from pass_ext.decoding.drafting.heads.head import Head
from pass_ext.decoding.session.session import Session
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.tree import PackedTrees, Tree


class HeadCalls(DraftCalls):
    """Calls a head on the trees of a batch, as ``DraftCalls`` a draft model."""

    def __init__(
        self, head: Head, session: Session, max_depth: int, texts: Sequence[list[int]], *, graphs: bool
    ) -> None:
        super().__init__(head, session, max_depth, texts, graphs=graphs, keep_hidden=False)
        self._head = head
        nothing = head.table.new_empty(0, head.module.state_width)
        self._true = [nothing] * len(texts)
        """The target's states, as the head takes them, of each text's rows that are not in the caches."""
        self._pending: list[list[Tensor]] = [[] for _ in texts]
        """The target's own states of rows that ``_true`` lacks yet; while drafting pauses they wait."""
        self._node_rows: dict[int, int] = {}
        """Where each request's root lay among the rows of the last call."""

    def take(self, hidden: Sequence[Tensor]) -> None:
        """Takes the target's states ``[new, taps, width]`` of what has become text since the last step."""
        for b, states in enumerate(hidden):
            if len(states):
                if self._held[b] == len(self._true[b]) == len(self._pending[b]) == 0:
                    # its first ones, which may begin after what `past` held
                    self._first[b] = len(self._texts[b]) - len(states)
                self._pending[b].append(states)

    def read_text(self, requests: Sequence[int]) -> None:
        if any(self._pending[b] for b in requests):
            pending, self._pending = self._pending, [[] for _ in self._pending]
            counts = [sum(map(len, pieces)) for pieces in pending]
            states = self._head.take(torch.cat([piece for pieces in pending for piece in pieces]))
            self._true = list(map(torch.cat, zip(self._true, states.split(counts), strict=True)))
        super().read_text(requests)

    def keep_text(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            requests = zip(last.trees, last.lags, strict=True)
            self._commit(last.packed, [[] if tree is None else list(range(lag + 1)) for tree, lag in requests])

    def _prepare(self, unread: Mapping[int, int], below: Tree) -> None:
        true = [self._true[b][:count] for b, count in unread.items()]
        count = sum(unread.values())
        if below.num_nodes == 1:
            self._head.beside = (torch.cat(true),)
        else:
            index: list[int] = []
            begin = 0
            for b, own in unread.items():
                index += range(begin, begin + own)
                index += (count + self._node_rows[b] + parent for parent in below.parents[1:])
                begin += own
            source = torch.cat((*true, *self._head.left))
            self._head.beside = (source.index_select(0, uploaded(index, source.device)),)
        row = 0
        for b, own in unread.items():
            self._node_rows[b] = row + own - 1
            row += own + below.num_nodes - 1

    def _commit(self, packed: PackedTrees, paths: Sequence[Sequence[int]]) -> None:
        super()._commit(packed, paths)
        self._true = [states[len(path) :] for states, path in zip(self._true, paths, strict=True)]

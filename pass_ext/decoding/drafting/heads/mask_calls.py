"""``MaskCalls``: the call of a head that drafts all levels at once, from a chain of masks below the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pass_ext.decoding.drafting.heads.head import Head, Masks
from pass_ext.decoding.drafting.heads.head_calls import HeadCalls
from pass_ext.decoding.session.session import Session
from pass_ext.tree import Tree


class MaskCalls(HeadCalls):
    """Calls a head once in a step, for ``max_depth`` levels."""

    def __init__(
        self, head: Head, masks: Masks, session: Session, max_depth: int, texts: Sequence[list[int]], *, graphs: bool
    ) -> None:
        super().__init__(head, session, max_depth, texts, graphs=graphs)
        self._masks, self._chain = masks, Tree.chain(max_depth - 1)
        self._logits: Mapping[int, Tensor] = {}

    def level(
        self, tree: Tree, requests: Sequence[int], tokens: Tensor, parents: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        if tree.max_depth == 0:
            levels = self._chain.num_nodes
            masks = tokens.new_full((len(tokens), levels), self._masks.token)
            logits, _ = super().level(self._chain, requests, masks, range(levels))
            self._logits = dict(zip(requests, logits.split(levels), strict=True))
        rows = [self._logits[b][tree.max_depth].expand(len(parents), -1) for b in requests]
        return torch.cat(rows), None

    def _prepare(self, unread: Mapping[int, int], below: Tree) -> None:
        masks = self._masks.state.expand(below.num_nodes - 1, -1)
        states = [part for b, own in unread.items() for part in (self._true[b][:own], masks)]
        self._head.beside = (torch.cat(states),)

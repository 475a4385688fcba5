"""``Guides``: the guides of a batch, and their masks as the ops take them, ``[rows, ceil(V / 32)]`` int32 words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.requests.grammar.guide import Guide
from pass_ext.decoding.requests.grammar.protocol import Grammar
from pass_ext.decoding.requests.grammar.trees import path_to
from pass_ext.tree import Tree

_METHODS = ("accept", "rollback", "fill_mask", "forced", "fork")


class Guides:
    """The guides of a batch.

    Args:
        guides: of each request; None: any token may follow.
        vocabulary: V, the number of the model's tokens.
        device: of the masks.
    """

    def __init__(self, guides: Sequence[Guide | None], vocabulary: int, device: torch.device) -> None:
        self._guides, self._device = list(guides), device
        self._every = torch.full((-(-vocabulary // 32),), -1, dtype=torch.int32)

    def of(self, request: int) -> Guide | None:
        """The guide of a request."""
        return self._guides[request]

    def of_nodes(self, trees: Sequence[Tree | None], tokens: Sequence[Sequence[int]], *, slots: bool) -> Tensor:
        """The masks behind all nodes of these trees, request by request.

        Args:
            trees: with or without look-ahead slots.
            tokens: of each tree's nodes, the root's first; -1: no token.
            slots: look-ahead slots have rows too; everything is allowed there.
        """
        rows: list[Tensor] = []
        for request, tree in enumerate(trees):
            if tree is None:
                continue
            rows += self._masks(request, tree, tokens[request], range(tree.num_nodes))
            rows += [self._every] * (len(tree) - tree.num_nodes if slots else 0)
        return self._stacked(rows)

    def below(
        self, tree: Tree, requests: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[int]
    ) -> Tensor:
        """The masks of the children of these parents in the same tree of each of these requests, request by request.

        Args:
            tokens: for each of these requests the tokens of its nodes, the root's first; -1: no token.
        """
        return self._stacked(
            [mask for b, row in zip(requests, tokens, strict=True) for mask in self._masks(b, tree, row, parents)]
        )

    def _masks(self, request: int, tree: Tree, tokens: Sequence[int], nodes: Sequence[int]) -> list[Tensor]:
        guide = self._guides[request]
        if guide is None:
            return [self._every] * len(nodes)
        return [guide.mask(path_to(tree, tokens, node)) for node in nodes]

    def _stacked(self, rows: list[Tensor]) -> Tensor:
        masks = torch.stack(rows)
        return masks.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else masks


def guides_of(
    grammar: Any, requests: int, vocabulary: int, ends: Collection[int], device: torch.device
) -> Guides | None:
    """The guides of a batch; None without a grammar.

    Args:
        grammar: one for all requests, or one or None for each.
    """
    each = list(grammar) if isinstance(grammar, (list, tuple)) else [grammar] * requests
    if len(each) != requests:
        raise ValueError(
            f"generate: grammar must be one for all, or one or None for each of the {requests} requests, got {len(each)}"
        )
    for entry in each:
        missing = [name for name in _METHODS if not callable(getattr(entry, name, None))]
        if entry is not None and (missing or isinstance(entry, type)):
            came = f"the class {entry.__name__}" if isinstance(entry, type) else type(entry).__name__
            came += " without " * bool(missing) + ", ".join(missing)
            raise TypeError(
                f"generate: grammar must be like pass_ext.Grammar, got {came}; "
                "pass_ext.integrations.grammar has xgrammar's and llguidance's"
            )
    if all(entry is None for entry in each):
        return None
    return Guides([None if entry is None else Guide(entry, vocabulary, ends) for entry in each], vocabulary, device)


GrammarArgument = Grammar | Sequence[Grammar | None] | None
"""The grammars of a batch, as ``generate`` takes them."""

"""``Guides``: the guides of a batch, and their masks as the ops take them, ``[rows, ceil(V / 32)]`` int32 words. Also a guide's
view of a tree of candidates: the nodes that it allows, and the chains that it forces after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.requests.grammar import Grammar, Guide
from pass_ext.ops.common.uploaded import sent
from pass_ext.tree import Tree


def path_to(tree: Tree, tokens: Sequence[int], node: int) -> list[int]:
    """The drafted tokens on the way to a node. tokens: of each node, the root's first."""
    return [tokens[v] for v in tree.path(node)[1:]]


def allowed_nodes(guide: Guide, tree: Tree, tokens: Sequence[int], fixed_parents: Sequence[bool]) -> list[int]:
    """The nodes worth a row of the model's call: those that the guide allows, in their order.

    A child that was drawn from the draft's distribution stays even if it is forbidden, as a leaf: the rules that divide by that
    distribution must reject it, or the rest would be verified wrongly. Without a mask at drafting such children exist.

    Args:
        tokens: of each node, the root's first; -1: no token.
        fixed_parents: of each node: True: its children are fixed proposals.
    """
    allowed = {0}
    kept = [0]
    for node in range(1, tree.num_nodes):
        parent = tree.parents[node]
        if parent not in allowed or tokens[node] < 0:
            continue
        if guide.allows(path_to(tree, tokens, node)):
            allowed.add(node)
        elif fixed_parents[parent]:
            continue
        kept.append(node)
    return kept


def forced_chains(
    guide: Guide, tree: Tree, tokens: Sequence[int], nodes: Iterable[int], levels: int, most: int
) -> dict[int, list[int]]:
    """The tokens that the grammar forces after these nodes, at most ``most`` in all, no deeper than ``levels``."""
    chains: dict[int, list[int]] = {}
    for node in nodes:
        path = path_to(tree, tokens, node)
        room = min(most, levels - len(path))
        if room > 0 and guide.allows(path) and (chain := guide.forced(path, room)):
            chains[node] = chain
            most -= len(chain)
    return chains


_METHODS = ("accept", "rollback", "fill_mask", "forced", "fork")


class Guides:
    """The guides of a batch, None where any token may follow, and their masks on a device. vocabulary: V."""

    def __init__(self, guides: Sequence[Guide | None], vocabulary: int, device: torch.device) -> None:
        self._guides, self._device = list(guides), device
        self._every = torch.full((-(-vocabulary // 32),), -1, dtype=torch.int32)

    def of(self, request: int) -> Guide | None:
        """The guide of a request."""
        return self._guides[request]

    def of_nodes(self, trees: Sequence[Tree | None], tokens: Sequence[Sequence[int]], *, slots: bool) -> Tensor:
        """The masks after all nodes of these trees, request by request.

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
        """The masks of the children of these parents in the same tree of each of these requests, request by request. tokens: as
        for ``of_nodes``, one row for each of these requests."""
        return self._stacked(
            [mask for b, row in zip(requests, tokens, strict=True) for mask in self._masks(b, tree, row, parents)]
        )

    def _masks(self, request: int, tree: Tree, tokens: Sequence[int], nodes: Sequence[int]) -> list[Tensor]:
        guide = self._guides[request]
        if guide is None:
            return [self._every] * len(nodes)
        return [guide.mask(path_to(tree, tokens, node)) for node in nodes]

    def _stacked(self, rows: list[Tensor]) -> Tensor:
        return sent(torch.stack(rows), self._device)


def guides_of(
    grammar: Any, prompts: int, vocabulary: int, ends: Collection[int], device: torch.device, samples: int = 1
) -> Guides | None:
    """The guides of a batch with so many texts of each prompt; None without a grammar."""
    each = list(grammar) if isinstance(grammar, (list, tuple)) else [grammar] * prompts
    if len(each) != prompts:
        raise ValueError(
            f"generate: grammar must be one for all, or one or None for each of the {prompts} requests, got {len(each)}"
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
    entries = [entry for entry in each for _ in range(samples)]
    guides = [None if entry is None else Guide(entry, vocabulary, ends) for entry in entries]
    return Guides(guides, vocabulary, device)


GrammarArgument = Grammar | Sequence[Grammar | None] | None
"""The grammars of a batch, as ``generate`` takes them."""

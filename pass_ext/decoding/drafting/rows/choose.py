"""``RowChoice``: the rows of one request's step, by what its slots say of this place in the text.

    slots     g behind the root, h behind its best candidate; behind a node without slots of its own, those of the node above it
              from the second one on, because they foresee the same tokens
    W(o, m)   = 0.8 · sum over i < m of  0.6^i · rate[o] · … · rate[o + i]          tokens that slots o + 1, …, o + m are worth
    tokens    = 1 + W(root's) + sum over candidates v of  reach(v) · (1 + W(slots of v) - W(slots of v's parent))
    rows      = arg max over g, h, k of  tokens,   1 + g + h + k at most the given rows;  k candidates, those of largest reach

reach(v) is the product of the slots' own probabilities on v's path, rate[i] the share of places where slot i's best candidate
is right. 0.8 and 0.6: the next step has to pay for rows too, and more for those of later slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pass_ext.decoding.drafting.step import Candidates, Groups
from pass_ext.tree import Tree

_WORTH, _FALL = 0.8, 0.6


class _Form(NamedTuple):
    """One choice of g and h."""

    groups: Groups
    rows: int
    """Its slots and the root."""
    worth: float
    """W of the root's slots."""
    weights: list[float]
    """For each node of the tree: 1 + W(its slots) - W(its parent's)."""


class RowChoice:
    """Chooses among the candidates of a tree.

    Args:
        tree: its child k of a node is the candidate of rank k; node 1 is the root's best.
        rates: of the slots' best candidates.
        rows: the most rows of a step.
    """

    def __init__(self, tree: Tree, rates: Sequence[float], rows: int) -> None:
        self._tree, self._rows, slots = tree, rows, len(rates)
        first = [False] * tree.num_nodes  # the root's best candidate, and all below it
        for node in range(1, tree.num_nodes):
            first[node] = node == 1 or first[tree.parents[node]]
        self._forms = [
            self._form(behind_root, behind_first, rates, first)
            for behind_root in range(slots + 1)
            for behind_first in range(slots + 1 if tree.num_nodes > 1 else 1)
            if 1 + behind_root + behind_first + (behind_first > 0) <= rows
        ]

    def choose(self, levels: int, tokens: Sequence[int], probabilities: Sequence[float]) -> Candidates | None:
        """The candidates and slots of a step; None: its root alone.

        Args:
            levels: how deep candidates may be.
            tokens: of nodes 1, 2, …; -1: none. Empty: there are no candidates.
            probabilities: of these tokens, by their slots.
        """
        tree, reach = self._tree, [1.0, *probabilities]
        nodes = []
        for node, token in enumerate(tokens, 1):
            reach[node] *= reach[tree.parents[node]] if token >= 0 and tree.depths[node] <= levels else 0.0
            if reach[node] > 0:
                nodes.append(node)
        nodes.sort(
            key=lambda node: -reach[node]
        )  # parents stay in front: chances are at most 1, and the sort is stable
        best, chosen = 1.0, 0
        groups: Groups = ()
        for form in self._forms:
            needed = len(form.groups) and form.groups[-1][0]  # 1: the best candidate, for its slots
            if any(node + count >= levels for node, count in form.groups):
                continue
            taken = nodes[: self._rows - form.rows]
            if needed and 1 not in taken:
                continue
            value = 1.0 + form.worth
            for node in taken:
                value += reach[node] * form.weights[node]
            if value > best + 1e-9:
                best, chosen, groups = value, len(taken), form.groups
        if not chosen and not groups:
            return None
        kept = tuple(sorted(nodes[:chosen]))
        return Candidates(_part(tree, kept), [tokens[node - 1] for node in kept], groups=groups)

    def _form(self, behind_root: int, behind_first: int, rates: Sequence[float], first: Sequence[bool]) -> _Form:
        def worth(node: int) -> float:
            passed = self._tree.depths[node]
            if first[node] and behind_first:
                return _worth(rates, passed - 1, behind_first)
            return _worth(rates, passed, behind_root)

        weights = [1.0 + worth(node) - worth(max(above, 0)) for node, above in enumerate(self._tree.parents)]
        groups = tuple((node, count) for node, count in enumerate((behind_root, behind_first)) if count)
        return _Form(groups, 1 + behind_root + behind_first, worth(0), weights)


def _worth(rates: Sequence[float], passed: int, slots: int) -> float:
    """W of those of so many slots that are behind the ``passed`` first ones."""
    total, right = 0.0, _WORTH
    for i in range(passed, slots):
        right *= rates[i]
        total += right
        right *= _FALL
    return total


@lru_cache(maxsize=4096)
def _part(tree: Tree, nodes: tuple[int, ...]) -> Tree:
    """The tree of the root and these nodes, which are in ascending order."""
    place = {node: index for index, node in enumerate((0, *nodes))}
    return Tree([-1, *(place[tree.parents[node]] for node in nodes)])

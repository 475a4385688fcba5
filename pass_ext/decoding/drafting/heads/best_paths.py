"""``best_paths``: the most probable paths through a lattice, as a tree.

    reach(node) = product of the chances on its path;   nodes are taken by reach
    worth       = the sum of their reach - costs[rows], largest with so many of them

A lattice has some tokens at each place, and for each pair of neighbours the chance that the second follows the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate

Chances = Sequence[Sequence[Sequence[float]]]
"""By place, number of the token in front and number of the token. In front of the first place is the root alone, number 0."""


def best_paths(
    tokens: Sequence[Sequence[int]], chances: Chances, most: int, costs: Sequence[float] | None = None
) -> tuple[list[int], list[int]]:
    """The tree of at most so many nodes below the root.

    Args:
        tokens: of each place.
        costs: tokens that a step of 1, 2, … rows costs; one node at least is taken. None: rows are free.

    Returns:
        ``(parents, tokens)`` of the nodes; -1 for the root's.
    """
    parents, found, reaches = [-1], [-1], [1.0]
    open_nodes: list[tuple[float, int, int, int]] = []  # (-reach, parent, number, place)

    def open_below(parent: int, number: int, place: int, reach: float) -> None:
        if place < len(tokens):
            for k, chance in enumerate(chances[place][number]):
                if chance > 0:
                    heappush(open_nodes, (-reach * chance, parent, k, place))

    open_below(0, 0, 0, 1.0)
    while open_nodes and len(found) <= most:
        reach, parent, number, place = heappop(open_nodes)
        parents.append(parent)
        found.append(tokens[place][number])
        reaches.append(-reach)
        open_below(len(found) - 1, number, place + 1, -reach)
    if costs is not None and len(found) > 1:
        worth = [gained - step_cost for gained, step_cost in zip(accumulate(reaches), costs, strict=False)]
        rows = max(range(2, len(found) + 1), key=lambda rows: worth[rows - 1])
        return parents[:rows], found[:rows]
    return parents, found

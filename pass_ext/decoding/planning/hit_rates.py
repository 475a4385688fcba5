"""Hit rates and call times for both planners: how likely each node of a tree is to be accepted.

    reach(v) = product of the hit rates on v's path        last(v) = reach(v) - sum of reach over v's children

reach: P(node v is accepted). last: P(it is the last accepted one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from pass_ext.tree import Tree

HitRates = Sequence[Sequence[float]]
"""``rates[i][r]``: P(the candidate of rank r at depth i + 1 is right | the path to its parent is right)."""
StepTime = Callable[[int], float]
"""Seconds of one model call at a number of rows."""


class CallTimes:
    """Seconds of one call for all requests, by the rows of each. Calls ``step_time`` once for every number of rows."""

    def __init__(self, name: str, step_time: StepTime, requests: int) -> None:
        self._name = name
        self._step_time = step_time
        self._requests = requests
        self._known: dict[int, float] = {}

    def at(self, rows: int) -> float:
        """Seconds of the call in which each request has so many rows."""
        if rows not in self._known:
            seconds = self._step_time(self._requests * rows)
            if not 0 < seconds < math.inf:
                raise ValueError(
                    f"{self._name} must give seconds above 0, got {seconds} for {self._requests * rows} rows"
                )
            self._known[rows] = seconds
        return self._known[rows]


def reach_of(tree: Tree, rates: Sequence[Sequence[float]]) -> list[float]:
    """For each node P(it is accepted), where child k of a node is the candidate of rank k."""
    reach = [1.0] * tree.num_nodes
    for node in range(tree.num_nodes):
        level = rates[tree.depths[node]] if tree.depths[node] < len(rates) else []
        for rank, child in enumerate(tree.children(node)):
            reach[child] = reach[node] * level[rank] if rank < len(level) else 0.0
    return reach


def last_of(parents: Sequence[int], reach: Sequence[float]) -> list[float]:
    """For each node P(it is the last accepted one)."""
    last = list(reach)
    for node, parent in enumerate(parents):
        if parent >= 0:
            last[parent] -= reach[node]
    return [max(0.0, value) for value in last]


def node_table(
    tree: Tree, reach: Sequence[float], last: Sequence[float], slots: Mapping[int, int] | None = None
) -> list[str]:
    """The lines of a table with one node each: its place in the tree, rank, probabilities and number of look-ahead slots."""
    names = list(_branches(tree))
    width = max(len("node"), *(len(name) for name, _ in names))
    ranks = {node: rank for above in range(tree.num_nodes) for rank, node in enumerate(tree.children(above))}
    lines = [f"{'node':<{width}}  rank  reached   last{'' if slots is None else '  slots'}"]
    for name, node in names:
        count = f"{(slots or {}).get(node, ''):>5}"
        lines.append(
            f"{name:<{width}}  {ranks.get(node, '-'):>4}  {reach[node]:7.3f}  {last[node]:5.3f}  {count}".rstrip()
        )
    return lines


def _branches(tree: Tree) -> Iterator[tuple[str, int]]:
    pending = [(0, "", "")]  # node, the branch drawn before it, the indentation of the lines below it
    while pending:
        node, line, indent = pending.pop()
        yield f"{line}{node}", node
        children = tree.children(node)
        for child in reversed(children):
            end = child == children[-1]
            pending.append((child, indent + ("└─ " if end else "├─ "), indent + ("   " if end else "│  ")))


def checked_rates(hit_rates: HitRates) -> list[list[float]]:
    """The rates as lists of floats; refuses rows that are not probabilities of exclusive events."""
    rates = [[float(rate) for rate in level] for level in hit_rates]
    for depth, level in enumerate(rates, 1):
        if not all(0 <= rate <= 1 for rate in level) or sum(level) > 1 + 1e-4:
            raise ValueError(
                f"hit_rates must be probabilities that sum to at most 1 for each depth, got {level} for depth {depth}"
            )
    return rates


def checked_count(name: str, value: int) -> int:
    """Returns the value; refuses anything but a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number, 1 or more, got {value!r}")
    return value


def counted(number: int, word: str) -> str:
    """A number and its noun: 1 node, 2 nodes."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"

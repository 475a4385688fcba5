"""The rows of a step, chosen at each place in the text: ``RowChoice`` is what they are chosen by.

    candidate v        tokens reach(v), the product of the chances on its path;  less what its parent's slots lose by it
    slot j behind v    tokens last(v) worth[j],  last(v) = reach(v) - reach of its chosen children
    rows of the step   the best ones, as many as give the most tokens per second

Where the device makes the rows, ``next_tree_`` chooses (csrc/core/next_tree.h). ``choose_rows`` chooses on the host, for all
requests together. A candidate comes behind its parent and a slot behind the slot before it. What rows give only falls as more
are chosen, so each is computed anew when its turn comes. Of equal ones the earlier request's comes first, then the candidate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pass_ext.decoding.planning.constants import LEAST_GAIN, WORTH, WORTH_OF_NEXT


@dataclass(frozen=True)
class RowChoice:
    """What the rows of a generation's steps are chosen by."""

    rows: int
    """The most of a request."""
    rates: tuple[float, ...]
    """For each slot the share of places where its best candidate is right."""
    has_price: bool = False
    """True: rows cost the time that they take. False: they are free."""

    @property
    def worth(self) -> tuple[float, ...]:
        """Of each slot: the tokens that it gives if the next step begins behind it."""
        right, found = WORTH, []
        for rate in self.rates:
            right *= rate
            found.append(right)
            right *= WORTH_OF_NEXT
        return tuple(found)


class Offer(NamedTuple):
    """The rows that a request could take, beside its root."""

    parents: Sequence[int]
    """Of each candidate, node 0 being the root; parents come first."""
    chances: Sequence[float]
    """Of each node: P(it is right | its parent is); 0: there is no candidate. The root's is 1."""
    worth: Sequence[float]
    """Of each look-ahead slot: see ``RowChoice``."""
    slots: Sequence[int]
    """The most slots behind each node."""


@dataclass
class Rows:
    """The rows of a request: its nodes in ascending order, the root first, and the slots behind them."""

    nodes: list[int] = field(default_factory=lambda: [0])
    slots: dict[int, int] = field(default_factory=dict)


def choose_rows(offers: Sequence[Offer], seconds: Callable[[int], float]) -> list[Rows]:
    """The rows of each request in the step that is expected to give the most tokens per second.

    Args:
        offers: one for each request.
        seconds: of the step by its rows.
    """
    result = [Rows() for _ in offers]
    for request, node, is_slot in _paying(offers, seconds) if offers else []:
        if is_slot:
            result[request].slots[node] = result[request].slots.get(node, 0) + 1
        else:
            result[request].nodes.append(node)
    for chosen in result:
        chosen.nodes.sort()
    return result


def _paying(offers: Sequence[Offer], seconds: Callable[[int], float]) -> list[tuple[int, int, bool]]:
    """The rows that pay (request, node, is a slot), by falling gain."""
    reach = [[1.0] + [0.0] * (len(offer.parents) - 1) for offer in offers]
    last = [list(values) for values in reach]
    slots = [[0] * len(offer.parents) for offer in offers]
    queue: list[tuple[float, int, bool, int]] = []  # -gain at most, request, is a slot, node

    def gain(request: int, is_slot: bool, node: int) -> float:
        offer = offers[request]
        if is_slot:
            return max(0.0, last[request][node]) * offer.worth[slots[request][node]]
        parent = offer.parents[node]
        lost = sum(offer.worth[: slots[request][parent]])
        return reach[request][parent] * offer.chances[node] * max(0.0, 1 - lost)

    def offer_row(request: int, is_slot: bool, node: int) -> None:
        if is_slot and slots[request][node] >= min(offers[request].slots[node], len(offers[request].worth)):
            return
        if (value := gain(request, is_slot, node)) >= LEAST_GAIN:
            heapq.heappush(queue, (-value, request, is_slot, node))

    def offer_behind(request: int, node: int) -> None:
        for child, parent in enumerate(offers[request].parents):
            if parent == node:
                offer_row(request, False, child)
        offer_row(request, True, node)

    for request in range(len(offers)):
        offer_behind(request, 0)
    order: list[tuple[int, int, bool]] = []
    total, best, paying = float(len(offers)), len(offers) / seconds(len(offers)), 0
    while queue:
        value, request, is_slot, node = heapq.heappop(queue)
        now = gain(request, is_slot, node)
        if now < -value - 1e-12:
            offer_row(request, is_slot, node)
            continue
        order.append((request, node, is_slot))
        total += now
        if is_slot:
            slots[request][node] += 1
            offer_row(request, True, node)
        else:
            parent = offers[request].parents[node]
            reach[request][node] = reach[request][parent] * offers[request].chances[node]
            last[request][node] = reach[request][node]
            last[request][parent] -= reach[request][node]
            offer_behind(request, node)
        rate = total / seconds(len(offers) + len(order))
        if rate > best * (1 + 1e-9):
            best, paying = rate, len(order)
    return order[:paying]

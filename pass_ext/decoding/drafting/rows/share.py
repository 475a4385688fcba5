"""``share_rows``: shares the rows of a batch's step among its requests, by the tokens that each row is expected to give.

    candidate v        weight reach(v), the product of the chances on its path;  less what its parent's slots lose by it
    slot j behind v    weight last(v) worth[j],  last(v) = reach(v) - reach of its chosen children
    rows of the step   arg max over k of  (requests + sum of the k largest gains) / seconds(requests + k);
                       the roots alone unless that is 15 % faster

A candidate comes behind its parent and a slot behind the slot before it. Gains only fall as more rows are chosen, so each is
computed anew when its turn comes. Of equal gains the earlier request's comes first, of one request's the candidate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_LEAST_GAIN = 0.02  # tokens of a row
# Against a step of the roots alone: estimates are rough, and not every text gains what the batch does.
_LEAST_SPEED = 1.15
_HOPELESS = 0.8  # of the best tokens per second: a search this far below it ends


class Offer(NamedTuple):
    """The rows that a request could take, beside its root."""

    parents: Sequence[int]
    """Of each candidate, node 0 being the root; parents come first."""
    chances: Sequence[float]
    """Of each node: P(it is right | its parent is); 0: there is no candidate. The root's is 1."""
    worth: Sequence[float]
    """Of each look-ahead slot: the tokens that it gives, less the rows that they cost, if the next step begins behind it."""
    slots: Sequence[int]
    """The most slots behind each node."""
    weight: float = 1.0
    """How much a token of this request counts; 1 on average."""


@dataclass
class Rows:
    """The rows of a request: its nodes in ascending order, the root first, and the slots behind them."""

    nodes: list[int] = field(default_factory=lambda: [0])
    slots: dict[int, int] = field(default_factory=dict)


def share_rows(offers: Sequence[Offer], seconds: Callable[[int], float]) -> list[Rows]:
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
    children = [_children(offer.parents) for offer in offers]
    queue: list[tuple[float, int, bool, int]] = []  # -gain at most, request, is a slot, node

    def gain(request: int, is_slot: bool, node: int) -> float:
        offer = offers[request]
        if is_slot:
            return offer.weight * max(0.0, last[request][node]) * offer.worth[slots[request][node]]
        parent = offer.parents[node]
        lost = sum(offer.worth[: slots[request][parent]])
        return offer.weight * reach[request][parent] * offer.chances[node] * max(0.0, 1 - lost)

    def offer_row(request: int, is_slot: bool, node: int) -> None:
        taken, worth = slots[request][node], offers[request].worth
        if is_slot and taken >= min(offers[request].slots[node], len(worth)):
            return
        if (value := gain(request, is_slot, node)) >= _LEAST_GAIN:
            heapq.heappush(queue, (-value, request, is_slot, node))

    def offer_behind(request: int, node: int) -> None:
        for child in children[request][node]:
            offer_row(request, False, child)
        offer_row(request, True, node)

    for request in range(len(offers)):
        offer_behind(request, 0)
    order: list[tuple[int, int, bool]] = []
    total, best, paying = float(len(offers)), _LEAST_SPEED * len(offers) / seconds(len(offers)), 0
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
        elif rate < _HOPELESS * best:
            break
    return order[:paying]


def _children(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children

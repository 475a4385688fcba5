"""Hit rates from ranks: how often the right token stood at which rank, and how far a chain or a tree of candidates gets.

``ranks`` [N, L]: rank of the right token among slot i's candidates at place n, the tokens before it being the right ones.
The best tree of n nodes takes, again and again, the candidate with the largest product of rates along its path.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

RANKS = 16
TOPS = (1, 2, 4, 8, 16)


def ranks_among(logits: Tensor, tokens: Tensor) -> Tensor:
    """``[R]``: rank of ``tokens`` [R] by their ``logits`` [R, V]; equal logits stand in the order of their ids."""
    score = logits.gather(1, tokens[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((logits > score) | ((logits == score) & (ids < tokens[:, None]))).sum(1)


def hit_rates(ranks: Tensor, count: int = RANKS) -> tuple[tuple[float, ...], ...]:
    """Row i: P(rank = k at slot i | all earlier slots' ranks < count), k < count. A slot nobody reached has zeros."""
    rows, reached = [], torch.ones(len(ranks), dtype=torch.bool)
    for column in ranks.unbind(1):
        here = column[reached]
        rows.append(tuple(round(float((here == rank).sum()) / max(len(here), 1), 5) for rank in range(count)))
        reached = reached & (column < count)
    return tuple(rows)


def top_rates(ranks: Tensor) -> list[dict[str, float]]:
    """For each slot, the share of places with the right token among the first 1, 2, 4, 8, 16 candidates."""
    return [
        {f"top {top}": round(float((column < top).float().mean()), 4) for top in TOPS} for column in ranks.unbind(1)
    ]


def best_tree(rates: tuple[tuple[float, ...], ...], nodes: int) -> set[tuple[int, ...]]:
    """The paths (ranks from the root on) of the ``nodes`` candidates that are most often right."""
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rates[0][0], (0,))]
    chosen: set[tuple[int, ...]] = set()
    while waiting and len(chosen) < nodes:
        value, path = heapq.heappop(waiting)
        chosen.add(path)
        depth, rank = len(path) - 1, path[-1]
        if rank + 1 < len(rates[depth]) and rates[depth][rank] > 0:
            sibling = value * rates[depth][rank + 1] / rates[depth][rank]
            heapq.heappush(waiting, (sibling, (*path[:-1], rank + 1)))
        if depth + 1 < len(rates):
            heapq.heappush(waiting, (value * rates[depth + 1][0], (*path, 0)))
    return chosen


def accepted_length(ranks: Tensor, tree: set[tuple[int, ...]]) -> float:
    """The mean number of candidates accepted when every place has this tree: counted, not computed from rates."""
    total = 0
    for row in ranks.tolist():
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in tree:
            depth += 1
        total += depth
    return total / max(len(ranks), 1)


def accepted_lengths(ranks: Tensor, rates: tuple[tuple[float, ...], ...]) -> dict[str, float]:
    """Accepted candidates a step: as a chain of all slots, and with the best tree of 4, 8, 16, 32 nodes."""
    chain = {(0,) * depth for depth in range(1, ranks.shape[1] + 1)}
    trees = {f"tree {nodes}": best_tree(rates, nodes) for nodes in (4, 8, 16, 32)}
    return {name: round(accepted_length(ranks, tree), 4) for name, tree in {"chain": chain, **trees}.items()}

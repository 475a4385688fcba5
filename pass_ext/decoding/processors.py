"""Logits processors per node: each node's logits are processed as if its path had been written already.

Called by ``generation`` where the caller gave processors (penalties, bans, constraints).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pass_ext.tree import Tree


def processed(
    logits: Tensor,
    processor: Callable[[Tensor, Tensor], Tensor],
    texts: Sequence[Sequence[int] | None],
    trees: Sequence[Tree | None],
    tokens: Sequence[Sequence[int]],
) -> Tensor:
    """logits ``[N, V]`` of packed trees -> float32, with every node's row processed; look-ahead rows stay as they are.

    A processor that has ``process_nodes(requests, texts, logits)`` gets all nodes at once, and learns whose they are.
    texts: of each request, the root last. tokens: of each request's nodes 1, 2, ….
    """
    result = logits.float()
    if result is logits:
        result = logits.clone()
    by_length: dict[int, list[tuple[int, int, list[int]]]] = defaultdict(list)
    takes_all = getattr(processor, "process_nodes", None)
    first = 0
    for request, (text, tree, own) in enumerate(zip(texts, trees, tokens, strict=True)):
        if tree is None or text is None:
            continue
        for node in range(tree.num_nodes):
            behind = [own[v - 1] for v in tree.path(node)[1:]]
            if min(behind, default=0) >= 0:
                length = len(text) + len(behind)
                by_length[0 if takes_all else length].append((first + node, request, [*text, *behind]))
        first += len(tree)
    for rows in by_length.values():
        places, requests, own_texts = zip(*rows, strict=True)
        index = torch.tensor(places, device=logits.device)
        if takes_all:
            result[index] = takes_all(requests, own_texts, result[index])
        else:
            result[index] = processor(torch.tensor(own_texts, device=logits.device), result[index])
    return result

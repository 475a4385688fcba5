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

    texts: of each request, the root last. tokens: of each request's nodes 1, 2, ….
    """
    result = logits.float()
    if result is logits:
        result = logits.clone()
    by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    first = 0
    for text, tree, own in zip(texts, trees, tokens, strict=True):
        if tree is None or text is None:
            continue
        for node in range(tree.num_nodes):
            behind = [own[v - 1] for v in tree.path(node)[1:]]
            if min(behind, default=0) >= 0:
                by_length[len(text) + len(behind)].append((first + node, [*text, *behind]))
        first += len(tree)
    for rows in by_length.values():
        index = torch.tensor([row for row, _ in rows], device=logits.device)
        ids = torch.tensor([text for _, text in rows], device=logits.device)
        result[index] = processor(ids, result[index])
    return result

"""Logits processors per node: each node's logits are processed as if its path had been written already.

Processors are penalties, bans, constraints: those of the model's generation_config and the caller's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from pass_ext.decoding.requests.stateful_processors import Processor, explained
from pass_ext.tree import Tree


def processed(
    logits: Tensor,
    processors: Sequence[Processor],
    texts: Sequence[Sequence[int] | None],
    trees: Sequence[Tree | None],
    tokens: Sequence[Sequence[int]],
) -> Tensor:
    """logits ``[N, V]`` of packed trees -> float32, with every node's row processed; look-ahead rows stay as they are.

    A processor that has ``process_nodes(requests, texts, logits)`` gets all nodes at once, and learns whose they are; others
    get all nodes whose texts are equally long.
    texts: of each request, the root last. tokens: of each request's nodes 1, 2, ….
    """
    result = logits.float()
    if result is logits:
        result = logits.clone()
    rows: list[int] = []
    requests: list[int] = []
    paths: list[list[int]] = []
    first = 0
    for request, (text, tree, own) in enumerate(zip(texts, trees, tokens, strict=True)):
        if tree is None or text is None:
            continue
        for node in range(tree.num_nodes):
            behind = [own[v - 1] for v in tree.path(node)[1:]]
            if min(behind, default=0) >= 0:
                rows.append(first + node)
                requests.append(request)
                paths.append([*text, *behind])
        first += len(tree)
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, path in enumerate(paths):
        by_length[len(path)].append(place)
    for processor in processors:
        takes_all = getattr(processor, "process_nodes", None)
        if takes_all is not None:
            index = torch.tensor(rows, device=logits.device)
            result[index] = takes_all(requests, paths, result[index])
            continue
        for places in by_length.values():
            index = torch.tensor([rows[place] for place in places], device=logits.device)
            ids = torch.tensor([paths[place] for place in places], device=logits.device)
            with explained(processor, ids):
                result[index] = processor(ids, result[index])
    return result

"""Logits processors per node: each node's logits are processed as if its path were text already.

Processors (penalties, bans, constraints) come from the model's generation_config and from the caller.
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
    """Processes the rows of all nodes; look-ahead rows stay as they are.

    A processor with ``process_nodes(requests, texts, logits)`` gets all nodes and their requests in one call; any other gets
    the nodes with equally long texts.

    Args:
        logits: ``[N, V]``, of packed trees.
        texts: each request's tokens, the root last.
        tokens: the tokens of each request's nodes 1, 2, ….

    Returns:
        ``[N, V]`` float32.
    """
    result = logits.float()
    if result is logits:
        result = logits.clone()
    rows: list[int] = []
    requests: list[int] = []
    paths: list[list[int]] = []
    first = 0
    for request, (text, tree, node_tokens) in enumerate(zip(texts, trees, tokens, strict=True)):
        if tree is None or text is None:
            continue
        for node in range(tree.num_nodes):
            behind = [node_tokens[v - 1] for v in tree.path(node)[1:]]
            if min(behind, default=0) >= 0:
                rows.append(first + node)
                requests.append(request)
                paths.append([*text, *behind])
        first += len(tree)
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, path in enumerate(paths):
        by_length[len(path)].append(place)
    for processor in processors:
        process_nodes = getattr(processor, "process_nodes", None)
        if process_nodes is not None:
            index = torch.tensor(rows, device=logits.device)
            result[index] = process_nodes(requests, paths, result[index])
            continue
        for places in by_length.values():
            index = torch.tensor([rows[place] for place in places], device=logits.device)
            ids = torch.tensor([paths[place] for place in places], device=logits.device)
            with explained(processor, ids):
                result[index] = processor(ids, result[index])
    return result

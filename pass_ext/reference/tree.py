"""``tree_prepare`` and ``tree_mask`` in plain PyTorch, node by node and request by request."""

from itertools import pairwise

import torch
from torch import Tensor


def tree_prepare(parents: Tensor, cu_nodes: Tensor, max_nodes: int) -> tuple[Tensor, Tensor]:
    """A node sees itself and all that its parent sees, and is one deeper. A node whose parent is no earlier node is a root."""
    visible = torch.zeros(parents.shape[0], -(-max_nodes // 64), dtype=torch.int64)
    depths = torch.zeros(parents.shape[0], dtype=torch.int32)
    for first, last in pairwise(cu_nodes.tolist()):
        for node, parent in enumerate(parents[first:last].tolist()):
            if 0 <= parent < node:
                visible[first + node] = visible[first + parent]
                depths[first + node] = depths[first + parent] + 1
            visible[first + node, node // 64] |= torch.tensor(1) << node % 64
    return visible.to(parents.device), depths.to(parents.device)


def tree_mask(
    visible: Tensor, cu_nodes: Tensor, max_nodes: int, prefix_lens: Tensor, kv_len: int, dtype: torch.dtype
) -> Tensor:
    """0 over the prefix and the nodes that a row sees, the dtype's lowest finite number elsewhere."""
    seen = (visible.unsqueeze(-1) >> torch.arange(64, device=visible.device) & 1).bool().flatten(1)
    requests = cu_nodes.shape[0] - 1
    mask = torch.full((requests, 1, max_nodes, kv_len), torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    for b, ((first, last), prefix) in enumerate(zip(pairwise(cu_nodes.tolist()), prefix_lens.tolist(), strict=True)):
        nodes = last - first
        if nodes > 0:
            mask[b, 0, :nodes, :prefix] = 0
            mask[b, 0, :nodes, prefix : prefix + nodes].masked_fill_(seen[first:last, :nodes], 0)
    return mask

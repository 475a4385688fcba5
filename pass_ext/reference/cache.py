"""``cache_commit_`` in plain PyTorch: for each request and tensor one gather and one scatter."""

from collections.abc import Sequence

import torch
from torch import Tensor


def cache_commit_(
    caches: Sequence[Tensor] | Tensor,
    prefix_lens: Tensor,
    cu_nodes: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    *,
    new: Sequence[Tensor] | Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """Slot prefix + j = row path[b, j] of `new`, or slot prefix + path[b, j], for j = 0 .. num_accepted[b]. Skips -1."""
    bounds, prefixes = cu_nodes.tolist(), prefix_lens.tolist()
    for b, prefix in enumerate(prefixes):
        if bounds[b] == bounds[b + 1]:
            continue
        nodes = path[b, : int(num_accepted[b]) + 1].long()
        targets = prefix + torch.arange(nodes.numel(), device=path.device)[nodes >= 0]
        nodes = nodes[nodes >= 0]
        for i, cache in enumerate(caches):
            rows = cache[_places(cache, b, prefix + nodes, block_table)] if new is None else new[i][bounds[b] + nodes]
            cache[_places(cache, b, targets, block_table)] = rows


def _places(cache: Tensor, request: int, slots: Tensor, block_table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The indices of a request's slots in the first two dimensions of the cache."""
    if block_table is None:
        return torch.full_like(slots, request), slots
    page = cache.shape[1]
    return block_table[request].long()[slots // page], slots % page

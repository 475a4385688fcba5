"""``convolution_tree`` in plain PyTorch: a window for each node, gathered along its path."""

from itertools import pairwise

import torch
from torch import Tensor


def convolution_tree(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    *,
    activation: str | None = None,
    state_index: Tensor | None = None,
) -> Tensor:
    """out = activation(bias + the sum of weight times the K newest inputs of a node's path), in float32, or float64 for it."""
    exact = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x)
    for request, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        windows: list[Tensor] = []
        for node, parent in enumerate(parents[first:last].tolist()):
            begin = states[request if state_index is None else int(state_index[request])]
            before = windows[parent][:, 1:] if 0 <= parent < node else begin
            windows.append(torch.cat([before, x[first + node, :, None]], 1))  # [C, K]
            total = (weight.to(exact) * windows[-1].to(exact)).sum(1)
            total = total if bias is None else total + bias.to(exact)
            out[first + node] = torch.nn.functional.silu(total) if activation == "silu" else total
    return out

"""``tree_prepare`` and ``tree_mask`` on the emulator."""

import torch
from torch import Tensor

from emulator import session
from emulator.ops.launching import name_of, pointers, seeds


def run(name: str, numbers: dict[str, int | str], inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
    buffers = {key: (tensor, "in") for key, tensor in inputs.items()}
    buffers |= {key: (tensor, "out") for key, tensor in outputs.items()}
    with session(buffers, seed=next(seeds)) as machine:
        getattr(machine, name)(numbers | pointers(buffers))


def tree_prepare(parents: Tensor, cu_nodes: Tensor, max_nodes: int) -> tuple[Tensor, Tensor]:
    rows, words = parents.numel(), -(-max_nodes // 64)
    visible, depths = torch.empty((rows, words), dtype=torch.int64), torch.empty(rows, dtype=torch.int32)
    run(
        "tree_prepare",
        dict(requests=cu_nodes.numel() - 1, rows=rows, max_nodes=max_nodes, words=words),
        {"parents": parents, "cu_nodes": cu_nodes},
        {"visible": visible, "depths": depths},
    )
    return visible, depths


def tree_mask(
    visible: Tensor, cu_nodes: Tensor, max_nodes: int, prefix_lens: Tensor, kv_len: int, dtype: torch.dtype
) -> Tensor:
    requests = cu_nodes.numel() - 1
    out = torch.empty((requests, 1, max_nodes, kv_len), dtype=dtype)
    run(
        "tree_mask",
        dict(
            dtype=name_of(dtype),
            requests=requests,
            rows=visible.shape[0],
            max_nodes=max_nodes,
            visible_stride=visible.stride(0),
            kv_len=kv_len,
        ),
        {"visible": visible, "cu_nodes": cu_nodes, "prefix_lens": prefix_lens},
        {"out": out},
    )
    return out


KERNELS = {"tree_prepare": tree_prepare, "tree_mask": tree_mask}

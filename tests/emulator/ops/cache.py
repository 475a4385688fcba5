"""``cache_commit_`` on the emulator: a launch for each group of tensors that lie alike."""

from torch import Tensor

from emulator import session
from emulator.ops.launching import given, seeds


def strides_of(tensor: Tensor) -> list[int]:
    return [stride * tensor.element_size() for stride in tensor.stride()]


def unstacked(tensors: list[Tensor], dims: int) -> list[Tensor]:
    """The items of a stack, or the tensors of a list."""
    return list(tensors[0]) if len(tensors) == 1 and tensors[0].dim() == dims + 1 else tensors


def layout_of(cache: Tensor, fresh: Tensor | None) -> tuple[tuple[str, int], ...]:
    outer, slot, head, _ = strides_of(cache)
    outers, slots, heads, dim = cache.shape
    numbers = dict(outer=outer, slot=slot, head=head, outers=outers, slots=slots, heads=heads)
    numbers["head_bytes"] = dim * cache.element_size()
    if fresh is not None:
        numbers["fresh_row"], numbers["fresh_head"], _ = strides_of(fresh)
    return tuple(numbers.items())


def cache_commit(caches, prefix_lens, cu_nodes, path, num_accepted, new, block_table) -> None:
    caches, new = unstacked(caches, 4), unstacked(new, 3) if new else None
    step = given(
        prefix_lens=prefix_lens, cu_nodes=cu_nodes, path=path, num_accepted=num_accepted, block_table=block_table
    )
    numbers = {name: tensor.data_ptr() for name, tensor in step.items()}
    numbers |= dict(requests=cu_nodes.numel() - 1, width=path.shape[1], path_stride=path.stride(0))
    if block_table is not None:
        numbers |= dict(table_stride=block_table.stride(0), table_width=block_table.shape[1])
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for i, cache in enumerate(caches):
        groups.setdefault(layout_of(cache, new[i] if new is not None else None), []).append(i)
    for layout, members in groups.items():
        buffers = {name: (tensor, "in") for name, tensor in step.items()}
        buffers |= {f"cache {i}": (caches[i], "inout") for i in members}
        if new is not None:
            buffers |= {f"new {i}": (new[i], "in") for i in members}
            numbers["new_rows"] = new[0].shape[0]
        pointers = {"caches": [caches[i].data_ptr() for i in members]}
        if new is not None:
            pointers["new"] = [new[i].data_ptr() for i in members]
        with session(buffers, seed=next(seeds)) as machine:
            machine.cache_commit(numbers | dict(layout) | pointers)


KERNELS = {"cache_commit_": cache_commit}

"""``attention_tree`` and ``attention_merge`` on the emulator."""

import itertools

import torch
from torch import Tensor

from emulator import session
from emulator.ops.launching import COUNTERS, given, seeds
from pass_ext.ops.quantize import CODE_HEADER, MOST_OF_CODES

FLOAT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
CODE_TYPES = {dtype: number for number, dtype in enumerate(MOST_OF_CODES, start=1)}
GRIDS = itertools.cycle((7, 1, 16, 3))  # blocks that fit on the GPU of the next launch


def strides_of(name: str, rows: Tensor | None) -> dict[str, int]:
    if rows is None:
        return {}
    *outer, slot, head, _ = rows.stride()
    return {f"{name}_outer": outer[0] if outer else 0, f"{name}_slot": slot, f"{name}_head": head}


def attention_tree(
    q, k_cache, v_cache, prefix_lens, cu_nodes, visible, max_nodes, k_new, v_new, block_table, depths, scale, softcap,
    window, sinks=None, chunk=-1, key_lists=None, batch_invariant=False, blocks=None, seed=None, record=None,
    multiprocessors=None,
):  # fmt: skip
    """``blocks``: those that fit on the GPU at once; ``multiprocessors``: of them, by default one for each block.

    ``record``: a dict that gets the number of "accesses", and the "copies" of 16 bytes to shared memory as
    (block, groups that the thread had committed before, address).
    """
    blocks = next(GRIDS) if blocks is None else blocks
    q = q.contiguous()
    rows, heads, head_dim = q.shape
    caches = dict(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    inputs = given(
        q=q, prefix_lens=prefix_lens, cu_nodes=cu_nodes, visible=visible, block_table=block_table, **caches,
        depths=depths if max(window, chunk) >= 0 else None, sinks=sinks, key_lists=key_lists,
    )  # fmt: skip
    codes = CODE_TYPES.get(k_cache.dtype, 0)
    value_dim = v_cache.shape[-1] - (CODE_HEADER if codes else 0)
    out, lse = q.new_empty(rows, heads, value_dim), torch.empty((rows, heads), dtype=torch.float32)
    pages_of_one = 1 if block_table is None else block_table.shape[1]
    numbers = {name: tensor.data_ptr() for name, tensor in (inputs | dict(out=out, lse=lse)).items()}
    for name, tensor in caches.items():
        numbers |= strides_of(name, tensor)
    numbers |= dict(
        rows=rows, heads=heads, head_dim=head_dim, value_dim=value_dim, kv_heads=k_cache.shape[2],
        requests=cu_nodes.numel() - 1, max_nodes=max_nodes,
        slots=pages_of_one * k_cache.shape[1], page_size=k_cache.shape[1], pages=k_cache.shape[0],
        table_stride=0 if block_table is None else block_table.stride(0), window=window, chunk=chunk,
        type=FLOAT_TYPES[q.dtype], codes=codes, batch_invariant=int(batch_invariant),
        visible_stride=visible.stride(0),
        list_stride=0 if key_lists is None else key_lists.stride(0),
        list_size=0 if key_lists is None else key_lists.shape[1],
        most_blocks=blocks, multiprocessors=blocks if multiprocessors is None else multiprocessors,
        scale=float(head_dim**-0.5 if scale is None else scale), softcap=float(softcap),
    )  # fmt: skip
    with session({}) as machine:
        workspace = torch.empty(machine.attention_workspace(numbers), dtype=torch.float32)
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    numbers |= {"workspace": workspace.data_ptr(), "counters": counters.data_ptr()}
    buffers = {name: (tensor, "in") for name, tensor in inputs.items()}
    buffers |= {"out": (out, "out"), "lse": (lse, "out"), "workspace": (workspace, "out")}
    buffers["counters"] = (counters, "inout")
    with session(buffers, seed=next(seeds) if seed is None else seed) as machine:
        if record is not None:
            machine.record_copies()
        machine.attention_tree(numbers)
        if record is not None:
            record |= {"copies": machine.taken_copies(), "accesses": machine.count_accesses()}
    assert not counters.any(), "the counters are not zero again"
    return out, lse


def attention_merge(out_a, lse_a, out_b, lse_b, sinks):
    inputs = {name: tensor.contiguous() for name, tensor in
              given(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, sinks=sinks).items()}  # fmt: skip
    out, lse = torch.empty(out_a.shape, dtype=out_a.dtype), torch.empty(lse_a.shape, dtype=torch.float32)
    numbers = {name: tensor.data_ptr() for name, tensor in (inputs | dict(out=out, lse=lse)).items()}
    numbers |= dict(rows=lse.numel(), heads=(1, *lse.shape)[-1], head_dim=out.shape[-1], type=FLOAT_TYPES[out.dtype])
    buffers = {name: (tensor, "in") for name, tensor in inputs.items()} | {"out": (out, "out"), "lse": (lse, "out")}
    with session(buffers, seed=next(seeds)) as machine:
        machine.attention_merge(numbers)
    return out, lse


KERNELS = {"attention_tree": attention_tree, "attention_merge": attention_merge}

"""``lookahead_embed`` and its gradient on the emulator."""

import torch
from torch import Tensor

from emulator import session
from emulator.ops.launching import name_of, pointers, seeds


def lookahead_embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    ids, lookahead = ids.contiguous(), lookahead.contiguous()
    out = table.new_empty((*ids.shape, table.shape[1]))
    buffers = {"ids": (ids, "in"), "table": (table, "in"), "lookahead": (lookahead, "in"), "out": (out, "out")}
    with session(buffers, seed=next(seeds)) as machine:
        machine.lookahead_embed(dict(
            pointers(buffers), dtype=name_of(table.dtype), slot_dtype=name_of(lookahead.dtype),
            wide_ids=ids.dtype == torch.int64, rows=ids.numel(), dim=table.shape[1], vocabulary=table.shape[0],
            slots=lookahead.shape[0], table_stride=table.stride(0),
        ))  # fmt: skip
    return out


def lookahead_embed_backward(grad: Tensor, ids: Tensor, rows: int, slots: bool, dtype: torch.dtype) -> Tensor:
    grad, ids = grad.contiguous(), ids.contiguous()
    shape = (rows, grad.shape[-1])
    out = grad.new_empty(shape, dtype=dtype) if slots else grad.new_zeros(shape, dtype=dtype)
    with session({}) as machine:
        splits = machine.lookahead_embed_backward_splits({"rows": ids.numel()})
    partial = grad.new_empty((splits if slots and splits > 1 else 0, *shape)).to(
        torch.float64 if grad.dtype == torch.float64 else torch.float32
    )
    buffers = {
        "grad": (grad, "in"),
        "ids": (ids, "in"),
        "partial": (partial, "out"),
        "out": (out, "out" if slots else "inout"),
    }
    with session(buffers, seed=next(seeds)) as machine:
        machine.lookahead_embed_backward(dict(
            pointers(buffers), dtype=name_of(grad.dtype), out_dtype=name_of(dtype), wide_ids=ids.dtype == torch.int64,
            rows=ids.numel(), dim=grad.shape[-1], out_rows=rows, slots=slots,
        ))  # fmt: skip
    return out


KERNELS = {"lookahead_embed": lookahead_embed, "lookahead_embed_backward": lookahead_embed_backward}

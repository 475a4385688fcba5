"""``lookahead_embed`` and its gradient on the emulator."""

import torch
from torch import Tensor

from emulator import session
from emulator.ops.launching import name_of, seeds


def lookahead_embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    ids, lookahead = ids.contiguous(), lookahead.contiguous()
    out = table.new_empty((*ids.shape, table.shape[1]))
    buffers = {"ids": (ids, "in"), "table": (table, "in"), "lookahead": (lookahead, "in"), "out": (out, "out")}
    with session(buffers, seed=next(seeds)) as machine:
        machine.lookahead_embed(
            name_of(table.dtype), name_of(lookahead.dtype), ids.dtype == torch.int64,
            *(tensor.data_ptr() for tensor in (ids, table, lookahead, out)),
            ids.numel(), table.shape[1], table.shape[0], lookahead.shape[0], table.stride(0),
        )  # fmt: skip
    return out


def lookahead_embed_backward(grad: Tensor, ids: Tensor, rows: int, slots: bool, dtype: torch.dtype) -> Tensor:
    grad, ids = grad.contiguous(), ids.contiguous()
    shape = (rows, grad.shape[-1])
    out = grad.new_empty(shape, dtype=dtype) if slots else grad.new_zeros(shape, dtype=dtype)
    with session({}) as machine:
        splits = machine.lookahead_embed_backward_splits(ids.numel())
    partial = grad.new_empty((splits if slots and splits > 1 else 0, *shape)).to(
        torch.float64 if grad.dtype == torch.float64 else torch.float32
    )
    buffers = {
        "grad": (grad, "in"),
        "ids": (ids, "in"),
        "partial sums": (partial, "out"),
        "out": (out, "out" if slots else "inout"),
    }
    with session(buffers, seed=next(seeds)) as machine:
        machine.lookahead_embed_backward(
            name_of(grad.dtype), name_of(dtype), ids.dtype == torch.int64,
            *(tensor.data_ptr() for tensor in (grad, ids, out, partial)),
            ids.numel(), grad.shape[-1], rows, slots,
        )  # fmt: skip
    return out


KERNELS = {"lookahead_embed": lookahead_embed, "lookahead_embed_backward": lookahead_embed_backward}

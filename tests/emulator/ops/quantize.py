"""``quantize_rows`` on the emulator: one launch."""

import torch
from torch import Tensor

from emulator import session
from emulator.ops.attention import CODE_TYPES
from emulator.ops.launching import name_of, pointers, seeds
from emulator.ops.step import groups_of
from pass_ext.ops.quantize import CODE_HEADER


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    dim = rows.shape[-1]
    out = rows.new_empty((*rows.shape[:-1], CODE_HEADER + dim), dtype=dtype)
    if not out.numel():
        return out
    rows, numbers = groups_of("rows", rows)
    buffers = {"rows": (rows, "in"), "out": (out, "out")}
    with session(buffers, seed=next(seeds)) as machine:
        machine.quantize_rows(dict(
            pointers(buffers), **numbers, dtype=name_of(rows.dtype), count=out.numel() // out.shape[-1], dim=dim,
            codes=CODE_TYPES[dtype],
        ))  # fmt: skip
    return out


KERNELS = {"quantize_rows": quantize_rows}

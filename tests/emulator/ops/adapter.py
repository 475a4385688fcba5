"""``adapter_rows_`` on the emulator: one launch."""

from emulator import session
from emulator.ops.launching import name_of, pointers, seeds


def adapter_rows_(out, x, ids, down, up, scale) -> None:
    adapters, rank, width = down.shape
    if not out.numel() or not adapters or not rank:
        return
    x, ids, down, up = (tensor.contiguous() for tensor in (x, ids, down, up))
    rows = out.view(-1, out.shape[-1]) if out.is_contiguous() else out
    buffers = {name: (tensor, "in") for name, tensor in dict(x=x, ids=ids, down=down, up=up).items()}
    buffers["out"] = (out, "inout")
    with session(buffers, seed=next(seeds)) as machine:
        machine.adapter_rows(dict(
            pointers(buffers), dtype=name_of(out.dtype), id_dtype=name_of(ids.dtype), rows=ids.numel(), outputs=up.shape[2],
            adapters=adapters, rank=rank, x_row=width, out_row=rows.stride(0), scale=float(scale), **{"in": width},
        ))  # fmt: skip


KERNELS = {"adapter_rows_": adapter_rows_}

"""One number per request or per row, as the sampling ops take them: a tensor, one number for all, or None.

Called by ``pass_ext.ops.draft`` and ``pass_ext.ops.accept``.
"""

import torch
from torch import Tensor

Parameter = Tensor | float | int | None


def column(value: Parameter, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The parameter as the kernels read it; None stays None. What the tensor's shape must be, they check themselves."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value if value.dtype == dtype and value.is_contiguous() else value.to(dtype).contiguous()
    return torch.full((rows,), value, dtype=dtype, device=device)


def seeds_for(seeds: Parameter, rows: int, device: torch.device, generator: torch.Generator | None) -> Tensor | None:
    """The caller's seeds, or fresh ones from a generator: torch's own for the device where none is given."""
    if seeds is None:
        return torch.randint(-(2**63), 2**63 - 1, (rows,), device=device, generator=generator)
    return column(seeds, rows, torch.int64, device)

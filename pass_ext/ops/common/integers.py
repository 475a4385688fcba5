"""Converts integer arguments (bounds, parents, lengths, tokens, paths, pages) to the dtype that kernels read.

Every integer dtype is accepted. On the CPU a number that does not fit the kernel's dtype is refused. On CUDA a check would need
a synchronisation, and under torch.compile there is no value to check: the number is clamped to the dtype's lowest or highest.
That is out of range for every op too.
"""

from typing import overload

import torch
from torch import Tensor


@overload
def integers(op: str, argument: str, tensor: Tensor, dtype: torch.dtype = torch.int32) -> Tensor: ...
@overload
def integers(op: str, argument: str, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None: ...
def integers(op: str, argument: str, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
    """The tensor in ``dtype``, or the tensor itself if it has that dtype. A tensor of floats or bools is returned unchanged:
    the op refuses it and names its dtype."""
    if tensor is None or tensor.dtype is dtype:
        return tensor
    if tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex():
        return tensor
    limits = torch.iinfo(dtype)
    wide = tensor.to(torch.int64)
    if tensor.dtype is torch.uint64:  # in int64, numbers of 2^63 and more are negative
        too_low, too_high = torch.zeros_like(wide, dtype=torch.bool), (wide < 0) | (wide > limits.max)
    else:
        too_low, too_high = wide < limits.min, wide > limits.max
    if _can_be_read(tensor):
        bad = (too_low | too_high).flatten()
        if bool(bad.any()):
            index = int(bad.nonzero()[0])
            raise ValueError(
                f"pass_ext::{op}: {argument} must fit {str(dtype).removeprefix('torch.')}, in [{limits.min}, {limits.max}], "
                f"got {tensor.flatten()[index].item()} at flat index {index}"
            )
    else:
        wide = torch.where(too_high, limits.max, torch.where(too_low, limits.min, wide))
    return wide.to(dtype).contiguous()


def _can_be_read(tensor: Tensor) -> bool:
    """True if the values can be read without a synchronisation: a plain CPU tensor, not traced, fake or vmapped."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )

"""Integer arguments of a step (bounds, parents, lengths, tokens, paths, pages) in the dtype that kernels read.

Every integer dtype is taken. On the CPU a number that does not fit the kernel's dtype is refused. On CUDA, where looking would
wait for the GPU, and under torch.compile it becomes the dtype's lowest or highest number: it stays out of range, and the op
treats it as any other number that is.
"""

from typing import overload

import torch
from torch import Tensor


@overload
def integers(op: str, argument: str, tensor: Tensor, dtype: torch.dtype = torch.int32) -> Tensor: ...
@overload
def integers(op: str, argument: str, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None: ...
def integers(op: str, argument: str, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
    """The tensor in ``dtype``; itself where it has it already. Numbers that are no integers come back as they are: the op's
    own check names their dtype."""
    if tensor is None or tensor.dtype is dtype:
        return tensor
    if tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex():
        return tensor
    limits = torch.iinfo(dtype)
    wide = tensor.to(torch.int64)
    if tensor.dtype is torch.uint64:  # what int64 does not hold has become negative
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
    """Whether the numbers are here and now: not on a GPU, not of a traced, fake or vmapped tensor."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )

"""``is_plain``: True if a kernel may read a tensor's memory as numbers of its shape and dtype."""

import torch
from torch import Tensor, nn


def is_plain(tensor: Tensor) -> bool:
    """False for subclasses (torchao's quantised tensors, DTensor, fake tensors, which define their own operations), for sparse
    and quantised tensors, and for tensors without memory: on the meta device, or with a freed storage."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and (not tensor.numel() or tensor.untyped_storage().nbytes() > 0)
    )

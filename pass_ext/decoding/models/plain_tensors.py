"""``is_plain``: whether a tensor's memory holds the numbers that its shape and dtype promise, so that a kernel may read it."""

import torch
from torch import Tensor, nn


def is_plain(tensor: Tensor) -> bool:
    """False for subclasses (torchao's quantised tensors, DTensor, fake ones: what they compute is their own), for sparse and
    quantised tensors, and where no memory is: on the meta device, or with its storage freed."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and (not tensor.numel() or tensor.untyped_storage().nbytes() > 0)
    )

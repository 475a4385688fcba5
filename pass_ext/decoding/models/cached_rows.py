"""Rows of keys and values as caches have them: padded, with values that are the first numbers of keys, and with what a feature
of a model keeps after the keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pass_ext.ops.attention import WIDTH_STEP


def padded(x: Tensor, width: int) -> Tensor:
    """Pads rows with zeros, which add nothing to a product."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def is_front(values: Tensor, keys: Tensor) -> bool:
    """True if values ``[..., Dv]`` are a view of the first numbers of keys ``[..., D]``."""
    return (
        values.data_ptr() == keys.data_ptr()
        and values.stride() == keys.stride()
        and values.shape[:-1] == keys.shape[:-1]
        and values.shape[-1] <= keys.shape[-1]
    )


def with_after(rows: Tensor, after: Tensor) -> Tensor:
    """Rows of keys ``[..., D]``, padded to a multiple of 16 numbers, or of their codes; and after them what else a layer
    keeps, ``[..., d]``, as it is, whatever the dtype of the rows: rounded numbers would choose other tokens."""
    rows, front = functional.pad(rows, (0, _padding(rows.shape[-1]))), _padding(after.shape[-1])
    parts = rows, functional.pad(after, (front, 0))
    return torch.cat([x.view(torch.uint8) for x in parts], -1).view(rows.dtype)


def split_after(rows: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What ``with_after`` has joined, as views: the rows without the numbers after, and these, ``[..., count]``."""
    numbers, size = rows.view(torch.uint8), dtype.itemsize
    front = numbers[..., : -(count + _padding(count)) * size]
    return front.view(rows.dtype), numbers[..., -count * size :].view(dtype)


def _padding(count: int) -> int:
    return -count % WIDTH_STEP

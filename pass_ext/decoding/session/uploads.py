"""``uploaded``: copies numbers from the host to the device without a synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Returns an int64 tensor. For a GPU it is copied from pinned memory: any other copy waits for all launched kernels."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

"""``uploaded``: numbers from the host, without waiting for the device. Called where steps are put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64. On a GPU from pinned memory: a copy from anywhere else would wait for all that was launched before."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

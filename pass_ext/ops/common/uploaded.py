"""Numbers of the host on a device, without a synchronisation: for a GPU from pinned memory, since any other copy waits for all
launched kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(
    numbers: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """A tensor of these numbers."""
    return sent(torch.tensor(numbers, dtype=dtype), device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's memory, on the device."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if device.type == "cpu" else tensor.to(device)

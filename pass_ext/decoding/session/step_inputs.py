"""What the host gives to a step: ``uploaded`` numbers, and packed trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pass_ext.tree import PackedTrees, Tree, pack_trees

_MAX_COMBINATIONS = 256


def uploaded(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Returns an int64 tensor, without a synchronisation. For a GPU it is copied from pinned memory: any other copy waits for
    all launched kernels."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class TreePacks:
    """Packs trees for one device; keeps the results for repeated combinations of trees."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._packed: dict[tuple[Tree | None, ...], PackedTrees] = {}

    def __call__(self, trees: Sequence[Tree | None]) -> PackedTrees:
        """The trees of all requests, packed; None: a request without rows."""
        key = tuple(trees)
        if key not in self._packed:
            if len(self._packed) >= _MAX_COMBINATIONS:
                self._packed.clear()
            self._packed[key] = pack_trees(trees, self._device)
        return self._packed[key]

"""``TreePacks``: packs the trees of a step, and caches the result for repeated combinations of trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pass_ext.tree import PackedTrees, Tree, pack_trees

_MAX_COMBINATIONS = 256


class TreePacks:
    """Packs trees for one device, with a cache."""

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

"""``RotationTable``: cosines and sines of a model's positions, computed once and looked up where frequencies are fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pass_ext.tree import MAX_TREE_NODES

_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose frequencies do not depend on the text's length."""
_LONGEST_TABLE = 1 << 20
"""Positions. After it, where hardly a text is, rotary embeddings are computed for each call."""

Rotations = tuple[Tensor, Tensor]


class RotationTable:
    """The table of one rotary embedding, a module of transformers. It grows with the texts."""

    def __init__(self, rotary: Any) -> None:
        types = getattr(rotary, "rope_type", None)
        self._is_fixed = set(types.values() if isinstance(types, dict) else [types]) <= _FIXED_ROPES
        self._table: Rotations | None = None

    def at(
        self, rows: Tensor, positions: Tensor, compute: Callable[[Tensor, Tensor], Rotations]
    ) -> tuple[Rotations, Tensor | None]:
        """Cosines and sines of these positions, and None; or of all, and the positions, where these do not depend on each
        other.

        Args:
            rows: on whose device, and in whose dtype, they are.
            compute: rows and positions ``[N]`` -> the embedding's cosines and sines there, ``[..., N, D']``.
        """
        table, length = self._table, int(positions.max()) + 1
        if not self._is_fixed or length > _LONGEST_TABLE:
            return compute(rows, positions), None
        if table is None or table[0].shape[-2] < length:
            longer = torch.arange(max(2 * length, MAX_TREE_NODES), device=rows.device)
            table = self._table = compute(rows, longer)
        return table, positions

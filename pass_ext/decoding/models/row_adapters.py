"""``RowAdapters``: the adapters of a call for the rows of its look-ahead slots. ``PlacedAdapters``: their numbers on the
model's device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.ops import adapter  # noqa: F401, which registers the op

_op = torch.ops.pass_ext.adapter_rows_.default


class PlacedAdapters(NamedTuple):
    """Copies of adapters in the dtype and on the device of a model."""

    scale: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """Place, such as "3.self_attn.q_proj", -> down ``[K, r, in]`` and up ``[K, r, out]``."""

    @classmethod
    def of(cls, adapters: SlotAdapters, slots: int, like: Tensor) -> PlacedAdapters:
        """Copies of the adapters of the first ``slots`` slots, as ``like``."""
        return cls(
            adapters.scale,
            {place: (_copied(down, like), _copied(up, like)) for place, down, up in adapters.pairs(slots)},
        )

    def has_shapes_of(self, other: PlacedAdapters) -> bool:
        """True if ``copy_`` can take the numbers of the other."""
        return self.scale == other.scale and _shapes(self) == _shapes(other)

    def copy_(self, other: PlacedAdapters) -> None:
        """Takes the other's numbers in place: recorded calls read the same memory."""
        for place, pair in self.pairs.items():
            for mine, theirs in zip(pair, other.pairs[place], strict=True):
                mine.copy_(theirs)


def _copied(parameter: Tensor, like: Tensor) -> Tensor:
    """A contiguous copy, which the op of all layers wants."""
    return parameter.detach().to(like, copy=True, memory_format=torch.contiguous_format)


def _shapes(adapters: PlacedAdapters) -> dict[str, list[torch.Size]]:
    return {place: [tensor.shape for tensor in pair] for place, pair in adapters.pairs.items()}


class RowAdapters:
    """The adapters of one call, whose rows have the ids ``[N]``."""

    def __init__(self, ids: Tensor, placed: PlacedAdapters) -> None:
        self.ids, self.placed = ids, placed

    def add_(self, place: str, out: Tensor, x: Tensor) -> Tensor:
        """Adds the products of the rows of slots to ``out [..., out]``, in place; a place without an adapter adds nothing."""
        pair = self.placed.pairs.get(place)
        if pair is None:
            return out
        down, up = pair
        if down.dtype is not out.dtype:  # layers that compute in another dtype than the table's
            x, down, up = (tensor.to(out.dtype) for tensor in (x, down, up))
        _op(out, x, self.ids, down, up, self.placed.scale)
        return out


def adapters_of_call(ids: Tensor, placed: PlacedAdapters | None) -> RowAdapters | None:
    """The adapters of a call; None if it has no row of a slot, where that can be seen without a synchronisation."""
    if placed is None or (ids.is_cpu and not bool((ids < 0).any())):
        return None
    return RowAdapters(ids, placed)

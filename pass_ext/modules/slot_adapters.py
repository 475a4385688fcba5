"""``SlotAdapters``: low-rank adapters of a model's linear layers for the rows of look-ahead slots alone.

    out = layer(x) + scale * (x @ down[k].T) @ up[k]    k: the slot, or 0 if all slots share an adapter

A place is a linear layer: the number of its decoder layer and its name there, "3.self_attn.q_proj".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.ops.adapter import MAX_RANK

_PLACE = re.compile(r"[0-9]+(\.[A-Za-z_][A-Za-z0-9_]*|\.[0-9]+)+")


class AdapterSize(NamedTuple):
    """The sizes of one adapter."""

    inputs: int
    outputs: int
    rank: int


class SlotAdapters(nn.Module):
    """Adapters by place. The product is zero before training, and yet has a gradient: ``down`` is random and ``up`` zero.

    Args:
        sizes: place -> sizes of its adapter.
        count: K, 1 if all slots share an adapter, else the number of slots.
        scale: of every product.

    Attributes:
        sizes: as given.
        down, up: ``[K, r, in]`` and ``[K, r, out]`` by place; ``pair`` finds both.
    """

    def __init__(
        self,
        sizes: Mapping[str, AdapterSize],
        count: int = 1,
        *,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not sizes or count < 1:
            raise ValueError(
                f"adapters need a place and a count of at least 1, got {len(sizes)} places and count {count}"
            )
        self.count, self.scale = count, float(scale)
        self.sizes = dict(sizes)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        options: dict[str, object] = {"device": device, "dtype": dtype}
        for place, (inputs, outputs, rank) in sorted(sizes.items(), key=lambda item: _order(item[0])):
            if not _PLACE.fullmatch(place):
                raise ValueError(
                    f"place must be a layer's number and a name there, as '3.self_attn.q_proj', got {place!r}"
                )
            if not 1 <= rank <= MAX_RANK:
                raise ValueError(f"the rank of {place} must be from 1 to {MAX_RANK}, got {rank}")
            self.down[_key(place)] = nn.Parameter(torch.randn(count, rank, inputs, **options) * inputs**-0.5)  # type: ignore[call-overload]
            self.up[_key(place)] = nn.Parameter(torch.zeros(count, rank, outputs, **options))  # type: ignore[call-overload]

    @property
    def places(self) -> list[str]:
        """All places, layer by layer."""
        return [key.replace("/", ".") for key in self.down]

    def pair(self, place: str) -> tuple[Tensor, Tensor]:
        """``down`` and ``up`` of a place."""
        return self.down[_key(place)], self.up[_key(place)]

    def pairs(self, slots: int | None = None) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(place, down, up) of the first ``slots`` slots; None: of all."""
        for place in self.places:
            down, up = self.pair(place)
            yield place, down[:slots], up[:slots]  # the shared adapter is there for any number of slots

    @property
    def layers(self) -> int:
        """The number of the last layer with an adapter, plus 1."""
        return 1 + max(int(place.partition(".")[0]) for place in self.places)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        ranks = sorted({down.shape[1] for _, down, _ in self.pairs()})
        shared = "shared by all slots" if self.count == 1 else f"for each of {self.count} slots"
        return f"{len(self.places)} places, rank {', '.join(map(str, ranks))}, {shared}, scale={self.scale:g}"


def _key(place: str) -> str:
    return place.replace(".", "/")  # names of parameters have no dots


def _order(place: str) -> tuple[int, str]:
    number, _, name = place.partition(".")
    return (int(number) if number.isdigit() else -1), name

"""``Taps``: the hidden states of a call's rows at some places of the model.

0, 1, …    the input of layer 0, of layer 1, …
L          the output of the last of L layers, in front of the final norm
"last"     after the final norm: what goes into the output layer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Tap = int | Literal["last"]


class Taps:
    """Keeps the states of one call. places: those that are wanted, in the order of the result."""

    def __init__(self, places: Sequence[Tap]) -> None:
        self.places = tuple(places)
        self._kept: dict[Tap, Tensor] = {}

    def keep(self, place: Tap, rows: Tensor) -> None:
        """Copies the rows ``[N, ...]`` of this place, if it is wanted: a model may write over its own."""
        if place in self.places:
            self.take(place, rows.clone())

    def take(self, place: Tap, rows: Tensor) -> None:
        """Takes the rows of a wanted place, over which nobody writes."""
        if place in self._kept:
            raise ValueError(
                f"hidden states: the model comes to {place!r} several times in a call, so it has no one state there"
            )
        self._kept[place] = rows

    @property
    def states(self) -> Tensor:
        """``[N, places, d]``; where a model has several streams, ``[N, places, streams, d]``."""
        missing = [place for place in self.places if place not in self._kept]
        if missing:
            raise ValueError(f"hidden states: the model did not come to {missing} in this call")
        return torch.stack([self._kept[place] for place in self.places], 1)


def check_places(places: Sequence[Tap], layers: int, name: str) -> None:
    """Refuses places that a model of so many layers has not."""
    for place in places:
        is_number = isinstance(place, int) and not isinstance(place, bool)
        if not (place == "last" or (is_number and 0 <= place <= layers)):
            raise ValueError(
                f'taps must be numbers from 0 to {layers}, the layers of {name or "the model"}, or "last", got {place!r}'
            )

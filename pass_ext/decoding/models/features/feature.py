"""``Feature``: what some transformers models have beside plain layers, as one plugin.

A feature knows by a model's modules who has it, says what of it is out of reach, and puts our code in its place in the model's
shadow. A new one is a file here and a row of ``table.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from pass_ext.decoding.models.step_states import StatePlace

Pair = tuple[Tensor, Tensor]
"""Keys and values of a layer."""
NONE: Mapping[Any, Any] = MappingProxyType({})


class Feature:
    """A subclass says what its feature has; what it leaves out is not there. model: without wrappers."""

    kinds: frozenset[str] = frozenset()
    """Layers that attend so, by the names of transformers' configs."""

    # ---- what is refused ----

    def unserved(self, model: Any) -> str | None:
        """Why the model cannot be decoded, to follow its name; None: it can."""
        return None

    def untrained(self, model: Any, length: int) -> str | None:
        """Why groups of slots in one call of training would get other numbers than slots in decoding; None: they get the same.
        length: the most tokens of a text and rows of its slots, together."""
        return None

    def uncut(self, model: Any) -> str | None:
        """Why the first layers are no model, to follow the model's name; None: they are."""
        return None

    def unadapted(self, model: Any) -> tuple[str, str] | None:
        """The end of the places at which slots have no adapter, and why, to follow "an adapter for" and a place; None: there
        are none."""
        return None

    def unplaced(self, model: Any) -> str | None:
        """Why positions must be the indices of tokens in the text; None: they may be others, as after pictures."""
        return None

    def needs_no_positions(self, model: Any) -> bool:
        """True if a row's place in the text changes nothing but what this feature adds."""
        return False

    # ---- in a model's shadow ----

    def attends(self, model: Any) -> bool:
        """True if layers attend by code of their own, which ``serve`` replaces."""
        return False

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        """Has the modules of a model's shadow compute the rows of a call by our code.

        embedded: gives the tokens ``[N]`` that ids are embedded as; those of slots stay negative.
        """

    # ---- what its layers keep of a text ----

    def after(self, model: Any) -> Mapping[int, int]:
        """The layers that keep numbers after their keys -> how many after those of each KV head."""
        return NONE

    def states(self, model: Any) -> Mapping[nn.Module, list[StatePlace]]:
        """The modules that keep states -> where transformers keeps them, in the order of their use."""
        return NONE

    def computed_by(self, model: Any) -> list[str]:
        """The names of the functions or modules that compute the states."""
        return []

    # ---- transformers' caches ----

    def other_format(self, model: Any) -> str:
        """The content of transformers' cache if it is not what a session's is; else ""."""
        return ""

    def from_theirs(self, model: Any, cache: Any, pairs: Mapping[int, Pair], columns: Tensor) -> Mapping[int, Pair]:
        """The layers whose keys and values a session has otherwise than transformers -> these. pairs: of each layer, keys and
        values ``[B, n, H, D]`` in these columns ``[B, n]`` of a cache."""
        return NONE

    def to_theirs(self, model: Any, pairs: Mapping[int, Pair]) -> Mapping[int, Pair]:
        """The other way, of keys and values ``[B, H, n, D]``, padded or not."""
        return NONE

    def new_layers(self, model: Any) -> Mapping[int, type]:
        """The layers that need a class of their own in transformers' cache, and it."""
        return NONE

    def write_after(self, model: Any, cache: Any, keys: Mapping[int, Tensor], rows: Tensor) -> None:
        """Writes what lies after the keys ``[B, S, H, D]`` in a session's caches, by layer, of these rows ``[B, n]``."""

"""``DeviceRows``: the rows of steps that the device makes, as a drafter hands them over. ``HostDecides``: why it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pass_ext.tree import Tree


class HostDecides(Exception):
    """The host decides something between two steps. because: what, as a clause of a message."""

    def __init__(self, because: str) -> None:
        super().__init__(because)


@dataclass(frozen=True)
class RowChoice:
    """How ``next_tree_`` chooses the rows of a generation's steps (csrc/core/next_tree.h)."""

    rows: int
    """The most of a request."""
    rates: tuple[float, ...]
    """For each slot the share of places where its best candidate is right."""
    has_cost: bool = False
    """True: rows cost the time that they take. False: they are free."""


class Offers(Protocol):
    """The tokens that look-ahead slots offer."""

    recalls: bool
    """True: tokens that the text recalls rise."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for offers that read the same memory."""
        ...

    def top_of_rows(self, logits: Tensor, requests: int) -> dict[str, Any]:
        """The most probable tokens of rows ``[requests * S, V]``, as keyword arguments of ``next_tree_``. Work for the device
        alone."""
        ...


@dataclass(frozen=True)
class DeviceRows:
    """The rows of every step of a generation, and the tokens that their slots offer."""

    tree: Tree
    """The rows of each request, with their look-ahead slots; with ``choice`` those of the first step."""
    offers: Offers | None = None
    """None: without candidates."""
    choice: RowChoice | None = None
    """None: all steps have the same rows."""

    @property
    def count(self) -> int:
        """Rows of a request."""
        return len(self.tree) if self.choice is None else self.choice.rows

    @property
    def prompt_slots(self) -> int:
        """Look-ahead slots after the last token of a prompt: as many as the root has."""
        return len(self.tree.group_rows(0))

    @property
    def depth(self) -> int:
        """Of the deepest candidate."""
        return self.tree.max_depth if self.choice is None else self.prompt_slots

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for rows whose recorded steps are the same."""
        return self.tree, self.choice, self.offers and self.offers.key

"""What the rows of a device's steps are: ``FixedRows``, one tree for all steps, or ``ChosenRows``, chosen at each place. Where
the host has to read each step before the next one can begin, there are none: ``HostDecides`` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pass_ext.decoding.drafting.lookahead.slot_tokens import SlotTokens
from pass_ext.tree import Tree


@dataclass(frozen=True)
class RowChoice:
    """What the rows of a generation's steps are chosen by, with ``next_tree_`` (csrc/core/next_tree.h)."""

    rows: int
    """The most of a request."""
    rates: tuple[float, ...]
    """For each slot the share of places where its best candidate is right."""
    has_price: bool = False
    """True: rows cost the time that they take. False: they are free."""


class HostDecides(Exception):
    """The host decides something between two steps. The message follows "because"."""


@runtime_checkable
class DrafterOnDevice(Protocol):
    """A drafter whose rows the device can make."""

    def device_rows(self, *, is_synthetic: bool) -> FixedRows | ChosenRows:
        """The rows of its steps; raises ``HostDecides`` where they depend on the host. is_synthetic: coins accept, along one
        fixed path."""
        ...


@dataclass(frozen=True)
class FixedRows:
    """The rows of every step of a generation."""

    candidates: Tree
    groups: tuple[tuple[int, int], ...] = ()
    """Nodes with look-ahead slots behind them, and how many slots: one number for all."""
    prompt_slots: int = 0
    """Look-ahead slots behind the last token of a prompt."""
    offers: SlotTokens | None = None
    """None: without candidates."""

    @property
    def tree(self) -> Tree:
        """All rows of a request."""
        return self.candidates.with_lookahead(dict(self.groups)) if self.groups else self.candidates

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for rows whose recorded steps are the same."""
        return self.candidates, self.groups, self.prompt_slots, self.offers and self.offers.key


@dataclass(frozen=True)
class ChosenRows:
    """What the rows of each step are chosen by."""

    choice: RowChoice
    offers: SlotTokens

    @property
    def prompt_slots(self) -> int:
        """Look-ahead slots behind the last token of a prompt."""
        return len(self.choice.rates)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for rows whose recorded steps are the same."""
        return self.choice, self.offers.key

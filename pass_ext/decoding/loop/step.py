"""``Step``: what the loop repeats, draft, verify, accept and commit, and what it reports of it.

host_step.py: the host drafts, when it has read the step before. fixed_step.py, chosen_step.py: the device makes the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pass_ext.decoding.loop.texts import Report, Texts
from pass_ext.decoding.planning.pace import Pace


class Step(ABC):
    """The step of a generation."""

    rows = 0
    """Rows of the last call, all requests together."""

    @property
    @abstractmethod
    def unread(self) -> int:
        """Steps that were run and not read, the prompts' included."""

    @abstractmethod
    def begin(self, texts: Texts, known: int) -> int:
        """Reads the prompts, whose first ``known`` tokens the session holds, and accepts the target's first tokens -> the
        number of calls."""

    @abstractmethod
    def __call__(self, *, drafts: bool) -> None:
        """Runs a step. drafts: False: without candidates and look-ahead slots."""

    @abstractmethod
    def read(self) -> list[Report]:
        """Waits for the oldest step that was not read, the prompts' first."""

    def follow(self, gained: Sequence[int]) -> None:
        """Learns what the texts have taken of the step just read. gained: tokens of each text."""
        return

    def price_by(self, pace: Pace, requests: int) -> None:
        """Learns what rows cost so many requests."""
        return

"""``Loop``: repeats a ``Step`` until every text has ended.

    step    draft, verify, accept, commit       step 1   step 2   step 3   …
    host    texts, ends, streamer, criteria              read 1   read 2   …

With lag 1 the host begins a step before it has read the one before, so a GPU never waits for it. The texts are the same. A text
that ends on the host (an end token, a stopping criterion) is written on for a step, whose tokens are thrown away.

A step drafts, verifies, accepts and commits. host_step.py: the host drafts, once it has read the step before. device_step.py:
the device makes the rows.
"""

from __future__ import annotations

import time
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
    def begin(self, texts: Texts, known: Sequence[int]) -> int:
        """Reads the prompts, whose first ``known[b]`` tokens the session holds, and accepts the target's first tokens -> the
        number of calls."""

    @abstractmethod
    def __call__(self, *, drafts: bool) -> None:
        """Runs a step. drafts: False: without candidates and look-ahead slots."""

    @abstractmethod
    def read(self) -> list[Report]:
        """Waits for the oldest step that was not read, the prompts' first."""

    def follow(self, gained: Sequence[int]) -> None:
        """Learns how many tokens each text has taken of the step just read."""
        return

    def price_by(self, pace: Pace, requests: int) -> None:
        """Learns the cost of rows for so many requests."""
        return


class Loop:
    """The loop of one generation.

    Args:
        pace: when drafting pauses, which takes a lag of 0; None: never.
        lag: steps that the host may be late.
    """

    def __init__(self, step: Step, texts: Texts, pace: Pace | None, lag: int) -> None:
        self.calls = 0
        """Calls of the model whose tokens were read."""
        self.prompt_calls = 0
        """How many of them read the prompts."""
        self.surplus_calls = 0
        """Calls after the end of all texts; their tokens are thrown away."""
        self._step, self._texts, self._pace, self._lag = step, texts, pace, lag
        self._begun: float | None = None
        self._drafts = True

    def run(self, known: Sequence[int]) -> None:
        """Reads the prompts, whose first ``known[b]`` tokens the session holds, and runs steps until every text has ended."""
        step, texts = self._step, self._texts
        if self._pace is not None:
            step.price_by(self._pace, len(texts))
        self.calls = self.prompt_calls = step.begin(texts, known)
        while any(texts.remaining):
            # Every step under way holds a token or more of each text.
            if step.unread <= self._lag and any(left > step.unread for left in texts.remaining):
                self._drafts = self._pace is None or self._pace.may_draft()
                self._begun = time.perf_counter()
                step(drafts=self._drafts)  # draft, verify, accept, commit
                self.calls += 1
            else:
                self._read()
        self.surplus_calls = step.unread
        self.calls -= step.unread

    def _read(self) -> None:
        """Extends the texts by the tokens of the oldest step that was not read."""
        step, texts, pace = self._step, self._texts, self._pace
        reports = step.read()
        seconds = None if self._begun is None else time.perf_counter() - self._begun
        active = [left > 0 for left in texts.remaining]
        gained = [texts.extend(b, report) if active[b] else 0 for b, report in enumerate(reports)]
        step.follow(gained)
        if pace is None:
            return
        if seconds is not None:  # not the call on the prompts
            pace.add(step.rows, sum(active), sum(gained), seconds, may_draft=self._drafts)
        step.price_by(pace, max(1, sum(left > 0 for left in texts.remaining)))

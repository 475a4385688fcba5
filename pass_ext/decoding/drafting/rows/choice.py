"""``RowChoice``: what ``next_tree_`` chooses the rows of each step by.

``RowPrices``: the tokens that a step of n rows costs, which is its time in tokens at the speed of the text.

    price(n) = t(n) · tokens / seconds      of the drafted steps so far; before them the plan's

t(n) is the planned time, corrected by that of the last steps with n rows (planning/run_times.py): planned times are measured at
some numbers of rows only, and between them calls take no straight line. Steps whose loss the credit of pauses (pace.py) covers
but a few times are not to be had: so a few wrong guesses do not end drafting.

A step whose expected tokens are more than its price is better than the steps so far. The rows with the largest difference lead
to the most tokens per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pass_ext.decoding.drafting.rows.pace import Pauses
from pass_ext.decoding.planning.step_times import StepTimes

_PLANNED_STEPS = 16  # so many steps the plan's tokens per second count for
_EVERY = 8  # steps
_ALWAYS_HAD = 6  # rows: with fewer a step could not have slots and candidates, and drafting would end without a pause


class RowPrices:
    """The prices of one text's rows.

    Args:
        times: the planned seconds of the target's calls.
        rows: of a step of the plan.
        tokens: that the plan expects of it.
    """

    def __init__(self, times: StepTimes, rows: int, tokens: float) -> None:
        self._steps, self._covered = 0, 0
        self._tokens, self._seconds = _PLANNED_STEPS * tokens, _PLANNED_STEPS * times.at(rows)
        self._known: list[float] = []

    def add(self, tokens: int, seconds: float) -> None:
        """Counts a drafted step. seconds: of such a step, as they are now."""
        self._steps += 1
        self._tokens += tokens
        self._seconds += seconds

    def of_rows(self, most: int, pauses: Pauses) -> list[float] | None:
        """The prices of 1, 2, … rows; None: those of the last call still hold."""
        is_due = self._steps % _EVERY == 0 or not self._known
        if is_due:
            self._known = [pauses.seconds_of(rows) for rows in range(1, most + 1)]
        limit = pauses.most_seconds
        covered = next((rows for rows in range(min(_ALWAYS_HAD, most), most) if self._known[rows] > limit), most)
        if not is_due and covered == self._covered:
            return None
        self._covered, pace = covered, self._tokens / self._seconds
        return [*(pace * seconds for seconds in self._known[:covered]), *[math.inf] * (most - covered)]


@dataclass(frozen=True)
class RowChoice:
    """What the rows of a generation's steps are chosen by."""

    rows: int
    """The most of a request."""
    rates: tuple[float, ...]
    """For each slot the share of places where its best candidate is right."""
    prices: RowPrices | None = None
    """None: rows are free."""

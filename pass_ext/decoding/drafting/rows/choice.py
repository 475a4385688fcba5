"""``RowChoice``: what ``next_tree_`` chooses the rows of each step by.

``RowPrices``: the tokens that a step of n rows costs: the seconds that it takes, times the tokens per second of the text.

    price(n) = t(n) · tokens / seconds        of the drafted steps so far, in planned seconds; before them the plan's

A step whose expected tokens are more than its price is better than the steps so far; the choice of rows with the largest difference
leads to the most tokens per second.
"""

from __future__ import annotations

from dataclasses import dataclass

from pass_ext.decoding.planning.step_times import StepTimes

_PLANNED_STEPS = 16  # so many steps the plan's tokens per second count for
_EVERY = 8  # steps


class RowPrices:
    """The prices of one text's rows.

    Args:
        times: the planned seconds of the target's calls.
        rows: of a step of the plan.
        tokens: that the plan expects of it.
    """

    def __init__(self, times: StepTimes, rows: int, tokens: float) -> None:
        self._times, self._steps = times, 0
        self._tokens, self._seconds = _PLANNED_STEPS * tokens, _PLANNED_STEPS * times.at(rows)

    def add(self, rows: int, tokens: int) -> bool:
        """Counts a drafted step -> True if prices have changed."""
        self._tokens += tokens
        self._seconds += self._times.at(rows)
        self._steps += 1
        return self._steps % _EVERY == 0

    def of_rows(self, most: int) -> list[float]:
        """The prices of 1, 2, … rows."""
        pace = self._tokens / self._seconds
        return [pace * self._times.at(rows) for rows in range(1, most + 1)]


@dataclass(frozen=True)
class RowChoice:
    """What the rows of a generation's steps are chosen by."""

    rows: int
    """The most of a request."""
    rates: tuple[float, ...]
    """For each slot the share of places where its best candidate is right."""
    prices: RowPrices | None = None
    """None: rows are free."""

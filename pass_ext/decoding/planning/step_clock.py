"""``StepClock``: how long a step takes, by its rows: measured beforehand, and corrected by the steps themselves.

    seconds(rows) = t(rows) · ratio

t is the measured table (step_times.py), ratio the lower median of seconds / t(rows) over the last plain steps or the last
drafted ones, those with as many rows first. While one kind is unknown, or drafted steps are too few to tell, the other stands
for it: a machine that is busy, or a text that is long, slows both.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from functools import lru_cache, partial
from statistics import median_low

from pass_ext.decoding.planning.constants import FEWEST_DRAFTED, OLDEST, REMEMBERED, REMEMBERED_OF_ROWS
from pass_ext.decoding.planning.step_times import StepTimes


class StepClock:
    """Seconds of steps.

    Args:
        table: the measured seconds of calls by their rows.
    """

    def __init__(self, table: StepTimes) -> None:
        self.table = table
        # when, seconds / t(rows)
        self._plain: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._drafted: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._of_rows: dict[int, deque[tuple[float, float]]] = defaultdict(partial(deque, maxlen=REMEMBERED_OF_ROWS))

    def add(self, rows: int, seconds: float, *, is_plain: bool) -> None:
        """Counts a step by the rows of all requests together."""
        sample = time.perf_counter(), seconds / self.table.at(rows)
        if is_plain:
            self._plain.append(sample)
        else:
            self._drafted.append(sample)
            self._of_rows[rows].append(sample)

    @property
    def knows_plain(self) -> bool:
        """True if a plain step was timed lately."""
        return bool(_lately(self._plain))

    def seconds(self, rows: int, *, is_plain: bool = False) -> float:
        """Seconds of a step by the rows of all requests together."""
        plain, drafted = _lately(self._plain), _lately(self._drafted)
        if is_plain:
            known = plain or drafted
        else:
            is_known = len(drafted) >= FEWEST_DRAFTED or not plain
            known = drafted if is_known else plain
            own = _lately(self._of_rows[rows]) if is_known and rows in self._of_rows else []
            known = [median_low(known), *own] if own else known
        return self.table.at(rows) * (median_low(known) if known else 1.0)


@lru_cache(maxsize=64)
def step_clock(table: StepTimes, tokens: int) -> StepClock:
    """The clock of texts of about so many tokens, a power of two: attention takes longer behind a long text. The same object
    until it was not used for long, so a generation begins with what the one before has seen."""
    return StepClock(table)


def _lately(samples: deque[tuple[float, float]]) -> list[float]:
    oldest = time.perf_counter() - OLDEST
    return [ratio for when, ratio in samples if when >= oldest]

"""``BatchSeconds``: how long a step of several requests takes.

    seconds(rows, requests) = planned seconds of a call with these rows + requests · what a request adds

Planned seconds are those of one request's rows. Each further one has a text of its own to read, and work on the host; more of it
where candidates are drafted. What a request adds is the lower median of the last steps of either kind.
"""

from __future__ import annotations

import time
from functools import lru_cache
from statistics import median_low

from pass_ext.decoding.planning.step_times import StepTimes

_MEMORY = 8  # steps
_OLDEST = 60.0  # seconds


class BatchSeconds:
    """Seconds of steps, learned at run time.

    Args:
        planned: the planned seconds of the target's calls.
    """

    def __init__(self, planned: StepTimes) -> None:
        self._planned = planned
        self._samples: dict[tuple[bool, int], list[tuple[float, float]]] = {}  # (is plain, requests) -> times, seconds

    def add(self, rows: int, requests: int, seconds: float) -> None:
        """Counts a step; with as many rows as requests it was plain."""
        samples = self._samples.setdefault((rows == requests, requests), [])
        samples.append((time.perf_counter(), (seconds - self._planned.at(rows)) / requests))
        del samples[:-_MEMORY]

    def knows_plain(self, requests: int) -> bool:
        """True if a plain step of so many requests was timed in the last minute."""
        return bool(self._last(True, requests))

    def at(self, rows: int, requests: int) -> float:
        """Seconds of a step; never fewer than those of a plain one, because disturbances only add time."""
        plain = self._planned.at(requests) + requests * self._added(True, requests)
        if rows == requests:
            return plain
        return max(plain, self._planned.at(rows) + requests * self._added(False, requests))

    def _added(self, is_plain: bool, requests: int) -> float:
        """What a request adds in steps of this kind, of so many requests or about so many; else in the other kind."""
        for kind in (is_plain, not is_plain):
            counts = sorted((abs(count - requests), count) for known, count in self._samples if known == kind)
            for _, count in counts:
                if samples := self._last(kind, count):
                    return median_low(samples)
        return 0.0

    def _last(self, is_plain: bool, requests: int) -> list[float]:
        oldest = time.perf_counter() - _OLDEST
        return [added for when, added in self._samples.get((is_plain, requests), ()) if when >= oldest]


@lru_cache(maxsize=64)
def batch_seconds(planned: StepTimes, tokens: int) -> BatchSeconds:
    """The seconds of texts of about so many tokens; the same object until it was not used for long. tokens: a power of two."""
    return BatchSeconds(planned)

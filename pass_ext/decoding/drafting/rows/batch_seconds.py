"""``BatchSeconds``: how long a step of several requests takes.

    seconds(rows, requests) = planned seconds of a call with these rows + requests · what a request adds

Planned seconds are those of one request's rows. Each further one has a text of its own to read, and work on the host; more of
it where candidates are drafted. What a request adds is the least of the last steps of either kind, because disturbances only
add time. Few drafted steps tell nothing: the first ones are slow. After some seconds without any they are tried again.
"""

from __future__ import annotations

import time
from functools import lru_cache

from pass_ext.decoding.planning.step_times import StepTimes

_MEMORY = 16  # steps
_FEWEST_PLAIN, _FEWEST_DRAFTED = 8, 4  # steps
_OLDEST_PLAIN, _OLDEST_DRAFTED = 60.0, 10.0  # seconds


class BatchSeconds:
    """Seconds of steps, learned at run time.

    Args:
        planned: the planned seconds of the target's calls.
    """

    def __init__(self, planned: StepTimes) -> None:
        self._planned = planned
        self._samples: dict[tuple[bool, int], list[tuple[float, float]]] = {}  # (is plain, requests) -> times, seconds

    def add(self, rows: int, requests: int, seconds: float, *, is_plain: bool) -> None:
        """Counts a step. is_plain: nothing was drafted for it; what a grammar forces may be in it."""
        samples = self._samples.setdefault((is_plain, requests), [])
        samples.append((time.perf_counter(), (seconds - self._planned.at(rows)) / requests))
        del samples[:-_MEMORY]

    @property
    def knows_plain(self) -> bool:
        """True if some plain steps were timed in the last minute."""
        return any(is_plain and len(self._last(True, count)) >= _FEWEST_PLAIN for is_plain, count in self._samples)

    def at(self, rows: int, requests: int) -> float:
        """Seconds of an undisturbed step; never fewer than those of a plain one."""
        plain = self._planned.at(requests) + requests * min(self._added(True, requests))
        if rows == requests:
            return plain
        drafted = self._added(False, requests) or self._added(True, requests)
        return max(plain, self._planned.at(rows) + requests * min(drafted))

    def usual_plain(self, requests: int) -> float:
        """Seconds of plain steps, the lower quartile: the first ones behind prompts are slow."""
        samples = sorted(self._added(True, requests))
        return self._planned.at(requests) + requests * samples[len(samples) // 4]

    def _added(self, is_plain: bool, requests: int) -> list[float]:
        """What a request added in the last steps of this kind, of so many requests or about so many."""
        counts = sorted((abs(count - requests), count) for known, count in self._samples if known == is_plain)
        known, fewest = (
            (self._last(is_plain, count) for _, count in counts),
            _FEWEST_PLAIN if is_plain else _FEWEST_DRAFTED,
        )
        return next((samples for samples in known if len(samples) >= fewest), [0.0] if is_plain else [])

    def _last(self, is_plain: bool, requests: int) -> list[float]:
        oldest = time.perf_counter() - (_OLDEST_PLAIN if is_plain else _OLDEST_DRAFTED)
        return [added for when, added in self._samples.get((is_plain, requests), ()) if when >= oldest]


@lru_cache(maxsize=64)
def batch_seconds(planned: StepTimes, tokens: int) -> BatchSeconds:
    """The seconds of texts of about so many tokens; the same object until it was not used for long. tokens: a power of two."""
    return BatchSeconds(planned)

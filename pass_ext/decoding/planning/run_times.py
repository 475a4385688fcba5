"""``RunTimes``: how long steps take at run time, as ratios to the planned seconds.

    ratio(rows)   median of (seconds / planned seconds) over the last steps with so many rows
    plain_ratio   the lower median over the last plain steps; min(1, ratio of the last drafted steps) while none was timed

Ratios let drafted and plain steps be compared although both are slower than planned: the machine is busy, or the text is long.
Steps of the last minute count, also those of earlier generations.
"""

from __future__ import annotations

import time
from functools import lru_cache
from statistics import median, median_low

from pass_ext.decoding.planning.step_times import StepTimes

_MEMORY = 8  # steps
_LAST_DRAFTED = 3  # steps with the same rows: when the machine changes, two of them tell
_OLDEST = 60.0  # seconds
_MOST_CHANGE = 0.25  # between the planned seconds and those at run time
_DOUBT_EVERY = 300.0  # seconds
_Samples = tuple[tuple[float, float], ...]


class RunTimes:
    """Ratios of the last steps, each with the time when it ended."""

    def __init__(self) -> None:
        self._plain: _Samples = ()
        self._drafted: dict[int, _Samples] = {}
        self._last: _Samples = ()
        self._doubted: float | None = None

    def add(self, rows: int, ratio: float, *, is_plain: bool) -> None:
        """Counts a step. ratio: its seconds / the planned seconds. is_plain: nothing was drafted."""
        sample = ((time.perf_counter(), ratio),)
        if is_plain:
            self._plain = _last(self._plain + sample)
        else:
            self._drafted[rows] = _last(self._drafted.get(rows, ()) + sample)[-_LAST_DRAFTED:]
            self._last = _last(self._last + sample)

    @property
    def knows_plain(self) -> bool:
        """True if a plain step was timed in the last minute."""
        return bool(_last(self._plain))

    @property
    def plain_ratio(self) -> float:
        """The ratio of plain steps. While it is unknown a low guess: then drafting looks no better than it is."""
        if plain := _last(self._plain):
            return median_low(_ratios(plain))
        return min(1.0, self._any_drafted())

    def ratio(self, rows: int) -> float:
        """The ratio of drafted steps with so many rows; while it is unknown, that of the last drafted steps."""
        samples = _last(self._drafted.get(rows, ()))
        return median(_ratios(samples)) if samples else self._any_drafted()

    def disagrees(self) -> bool:
        """True if steps take another time than planned; then not again for five minutes."""
        kinds = [samples for samples in (_last(self._plain), _last(self._last)) if len(samples) == _MEMORY]
        if not any(abs(median(_ratios(samples)) - 1) > _MOST_CHANGE for samples in kinds):
            return False
        now = time.perf_counter()
        if self._doubted is not None and now - self._doubted < _DOUBT_EVERY:
            return False
        self._doubted = now
        return True

    def _any_drafted(self) -> float:
        samples = _last(self._last)
        return median(_ratios(samples)) if samples else 1.0


@lru_cache(maxsize=64)
def run_times(planned: StepTimes, tokens: int) -> RunTimes:
    """The ratios to these planned seconds, for texts of about so many tokens; the same object until it was not used for long.

    tokens: a power of two. Attention takes longer behind a long text.
    """
    return RunTimes()


def _last(samples: _Samples) -> _Samples:
    oldest = time.perf_counter() - _OLDEST
    return tuple(sample for sample in samples[-_MEMORY:] if sample[0] >= oldest)


def _ratios(samples: _Samples) -> list[float]:
    return [ratio for _, ratio in samples]

"""``Pace``: whether drafting pays for one request just now.

Gain is tokens per time, both of the recent steps, in units of a plain step: sum of tokens / (sum of t / t plain). Below 1
for long enough, steps are plain for a while, longer each time; then it is tried again.
"""

from __future__ import annotations

_MEMORY = 24  # steps
_TRIAL = 10  # steps before the first judgement
_SHORTEST_REST, _LONGEST_REST = 24, 384  # steps


class Pace:
    """Of one request.

    Args:
        plain: seconds of a plain step.
    """

    def __init__(self, plain: float) -> None:
        self._plain = plain
        self._rest = 0
        self._next_rest = _SHORTEST_REST
        self._begin()

    def _begin(self) -> None:
        self._steps, self._tokens, self._cost = 0, 0.0, 0.0

    @property
    def rests(self) -> bool:
        """Whether the next step should be plain."""
        return self._rest > 0

    def add(self, seconds: float, tokens: int) -> None:
        """A step that takes so long, as measured beforehand, gave so many tokens."""
        if self._rest > 0:
            self._rest -= 1
            return
        fade = 1 - 1 / _MEMORY
        self._steps += 1
        self._tokens = fade * self._tokens + tokens
        self._cost = fade * self._cost + seconds / self._plain
        if self._steps < _TRIAL:
            return
        if self._tokens < self._cost:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
            self._begin()
        elif self._steps > 2 * _MEMORY:
            self._next_rest = _SHORTEST_REST

"""``Pace``: pauses the drafting of one request while it does not pay.

    gain = sum of tokens / sum of (t / t of a plain step), over the recent steps

After a gain below 1 the next steps are plain, for longer each time; then drafting is tried again.
"""

from __future__ import annotations

_MEMORY = 24  # steps
_TRIAL = 10  # steps before the first judgement
_SHORTEST_REST, _LONGEST_REST = 24, 384  # steps


class Pace:
    """The gain of one request's drafts.

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
        """True: the next step should be plain."""
        return self._rest > 0

    def add(self, seconds: float, tokens: int) -> None:
        """Counts a step. seconds: the step's expected time, by the measured times. tokens: how many it gave."""
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

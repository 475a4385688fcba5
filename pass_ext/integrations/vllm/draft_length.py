"""``DraftLength``: how many tokens to draft for a batch, by measured time.

    rate(length) = sum of tokens / sum of seconds, over the recent steps of batches of this size

The best rate wins. Lengths start with a trial each, the longest first; those that lost are tried again, more and more rarely.
Batches of 1, 2–3, 4–7, … requests are measured apart: a call with many requests has no idle arithmetic left to draft with.
"""

from __future__ import annotations

from collections.abc import Sequence

_TRIAL = 24  # steps; even, so that cycles of two calls are whole
_MEMORY = 96  # steps
_SHORTEST_STAY, _LONGEST_STAY = 192, 3072  # steps


class DraftLength:
    """The choice among some lengths, for batches of every size.

    Args:
        lengths: tokens to draft, 0 among them.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = sorted(lengths, reverse=True)
        self._sizes: dict[int, _OfSize] = {}

    def choose(self, requests: int) -> int:
        """The length for the next step of a batch."""
        return self._of(requests).current

    def add(self, requests: int, length: int, seconds: float, tokens: int) -> None:
        """Counts a step that drafted ``length`` tokens for each request, took so long and gave so many tokens in all."""
        self._of(requests).add(length, seconds, tokens)

    def _of(self, requests: int) -> _OfSize:
        return self._sizes.setdefault(requests.bit_length(), _OfSize(self._lengths))


class _OfSize:
    """The lengths' rates at one size of batch: trials of all lengths, then the best one for a while, and again."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._rates = dict.fromkeys(lengths, (0.0, 0.0))  # tokens and seconds, fading
        self._queue = [(length, _TRIAL) for length in lengths]
        self._best = lengths[0]
        self._stay = _SHORTEST_STAY

    @property
    def current(self) -> int:
        return self._queue[0][0]

    def add(self, length: int, seconds: float, tokens: int) -> None:
        current, steps = self._queue.pop(0)
        if length != current:  # the step was chosen at another size
            self._queue.insert(0, (current, steps))
            return
        fade = 1 - 1 / _MEMORY
        before = self._rates[length]
        self._rates[length] = fade * before[0] + tokens, fade * before[1] + seconds
        if steps > 1:
            self._queue.insert(0, (current, steps - 1))
        elif not self._queue:
            self._decide()

    def _decide(self) -> None:
        best = max(self._rates, key=lambda length: self._rates[length][0] / self._rates[length][1])
        self._stay = min(2 * self._stay, _LONGEST_STAY) if best == self._best else _SHORTEST_STAY
        self._best = best
        others = [length for length in self._rates if length != best]
        self._queue = [(best, self._stay), *((length, _TRIAL) for length in others)]

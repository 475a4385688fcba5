"""``Chances``: the chance that a slot's candidate is right, from the slot's own probability of it.

    odds(chance of the best candidate) = e^shift[depth] · odds(its probability)
    chance of another one              = its probability · (1 - chance of the best) / (1 - probability of the best)
    shift[depth] += 0.1 (right - chance)                                          whenever the text tells

Slots foresee a token without the one before it, so they are less sure than they are right; how much so is learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_RATE = 0.1
_LEAST, _MOST = 1e-3, 0.995


class Chances:
    """The shifts of a generation.

    Args:
        levels: depths of candidates.
    """

    def __init__(self, levels: int) -> None:
        self._shifts = [0.0] * levels

    def of(self, depth: int, probabilities: Sequence[float]) -> list[float]:
        """The chances of the candidates at this depth, from 1 on, below a node: the best first, which falls to no more than 1
        in sum."""
        first = min(max(probabilities[0], _LEAST), _MOST)
        odds = math.exp(self._shifts[depth - 1]) * first / (1 - first)
        best = min(odds / (1 + odds), _MOST)
        rest = (1 - best) / (1 - first)
        return [best, *(min(probability * rest, 1 - best) for probability in probabilities[1:])]

    def learn(self, depth: int, chance: float, is_right: bool) -> None:
        """Counts whether the best candidate at this depth, which had this chance, was right."""
        self._shifts[depth - 1] += _RATE * (is_right - chance)

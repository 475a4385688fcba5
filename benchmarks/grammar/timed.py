"""``Timed``: a grammar whose calls are timed, over all of its forks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pass_ext import Grammar


@dataclass
class Clock:
    """Seconds in the calls of a grammar, and the number of masks."""

    seconds: float = 0.0
    masks: int = 0


class Timed(Grammar):
    """A grammar that adds the seconds of its calls to a clock."""

    def __init__(self, grammar: Grammar, clock: Clock) -> None:
        self._grammar, self._clock = grammar, clock

    def accept(self, token: int) -> bool:
        """As ``Grammar``."""
        return bool(self._timed(self._grammar.accept, token))

    def rollback(self, count: int) -> None:
        """As ``Grammar``."""
        self._timed(self._grammar.rollback, count)

    def fill_mask(self, words: Tensor) -> None:
        """As ``Grammar``."""
        self._clock.masks += 1
        self._timed(self._grammar.fill_mask, words)

    @property
    def may_end(self) -> bool:
        """As ``Grammar``."""
        return bool(self._timed(lambda: self._grammar.may_end))

    def forced(self) -> Sequence[int]:
        """As ``Grammar``."""
        tokens: Sequence[int] = self._timed(self._grammar.forced)
        return tokens

    def fork(self) -> Grammar:
        """As ``Grammar``."""
        return Timed(self._grammar.fork(), self._clock)

    def _timed(self, call: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        self._clock.seconds += time.perf_counter() - started
        return result

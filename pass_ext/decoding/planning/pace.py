"""``Pace``: whether the next step of a batch drafts, and the cost of its rows.

    lost    seconds of a drafted step / those of a plain one - its tokens / those of a plain one; gains only make good losses
    pause   once 3 plain steps or more are lost: 32 plain steps for each. Each trial after a pause ends once 1.5 are lost, in a
            pause as for 6, for 12, then always for 18, if no more were lost. A text after one that ended so begins with one
    cost   of n rows of each request: their seconds, in tokens at the speed of the last steps

So drafts that are never right cost 3 % of a text of 256 tokens, where a drafted step takes less than two plain ones, and 5 %
where it takes three; and drafts that become right are found again within 576 plain steps, or 32 for each that a dear one loses.

Where no plain steps were timed lately, some stand behind the first drafted one, for comparison; the one right behind it is not
timed, for drafting may slow it: caches hold a head's weights, or its threads still spin. The seconds of the first drafted step
tell nothing, for in it a head reads the prompt: unless the text before tells what drafting takes, the next one does for both.
"""

from __future__ import annotations

from pass_ext.decoding.planning.constants import (
    COSTED_EVERY,
    KEPT,
    LONGEST,
    MOST_LOST,
    MOST_LOST_AGAIN,
    PAUSED,
    PLANNED_STEPS,
)
from pass_ext.decoding.planning.step_times import StepClock


class Pace:
    """The pace of one generation.

    Args:
        clock: the seconds of its steps.
        tokens, seconds: that the plan expects of a step, the tokens of each request.
    """

    def __init__(self, clock: StepClock, tokens: float, seconds: float) -> None:
        self.clock = clock
        self._tokens, self._seconds = PLANNED_STEPS * tokens, PLANNED_STEPS * seconds
        self._lost, self._left = 0.0, 0
        self._has_drafted = self._was_drafted = False  # any step; the last one
        self._unknown: list[float] = []
        """Tokens of drafted steps whose seconds nobody knows yet, in those of plain ones."""
        self._steps, self._plain_tokens = 0, 1.0
        self._costed_at = 0  # the step from which on rows have new costs

    def may_draft(self) -> bool:
        """True if the next step may draft."""
        return not self._left and (self.clock.knows_plain or not self._has_drafted)

    def add(self, rows: int, requests: int, tokens: int, seconds: float, *, may_draft: bool) -> None:
        """Counts a step: the rows and tokens of so many requests together. may_draft: False: nothing was drafted, though
        rows may hold tokens that a grammar forces."""
        is_plain = rows == requests or not may_draft
        if not self._was_drafted if is_plain else self._has_drafted:
            self.clock.add(rows, seconds, is_plain=is_plain)
        self._has_drafted, self._was_drafted = self._has_drafted or not is_plain, not is_plain
        self._steps += 1
        each = tokens / requests
        took = self.clock.seconds(rows, is_plain=is_plain)
        self._tokens, self._seconds = KEPT * self._tokens + each, KEPT * self._seconds + took
        if is_plain:
            self._left = max(0, self._left - 1)
            self._plain_tokens = KEPT * self._plain_tokens + (1 - KEPT) * each
            return
        self._unknown.append(each / self._plain_tokens)
        if not self.clock.knows_drafted:
            return
        dearer = took / self.clock.seconds(requests, is_plain=True)
        self._lost += sum(dearer - tokens for tokens in self._unknown)
        self._unknown.clear()
        trials = self.clock.trials
        if self._lost < 0:  # it has paid
            self._lost, trials.lost = 0.0, 0
        if self._lost >= (MOST_LOST_AGAIN if trials.lost else MOST_LOST):
            self._left = round(PAUSED * max(self._lost, min(MOST_LOST * 2**trials.lost, LONGEST)))
            self._lost, trials.lost = 0.0, trials.lost + 1

    def costs(self, most: int, requests: int) -> list[float] | None:
        """Tokens that a step of 1, 2, … rows costs each of so many requests; None: those of the last call still hold."""
        if self._steps < self._costed_at:
            return None
        self._costed_at = self._steps + COSTED_EVERY
        speed = self._tokens / self._seconds
        return [speed * self.clock.seconds(n * requests, is_plain=n == 1) for n in range(1, most + 1)]

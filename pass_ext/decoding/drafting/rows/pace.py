"""``Pauses``: pauses drafting before its losses are more than 2 % of a text's time, by the seconds that steps take.

    loss of a drafted step = seconds / seconds of a plain step - tokens      (in plain steps; negative: a gain)
    credit                 = 2 % of max(96, tokens of the text) - losses,    at most 2 % of 192 tokens, or two steps' losses
    drafts                   while the credit covers the loss of a step that gives no more than the target's own token

So a text of 96 tokens or more takes at most plain decoding's time / 0.98, also if no draft is ever right and a step takes twice
the planned time: the first step tells. A dear step has one trial, a cheap one many. Gains and the text refill the credit. Two
things exceed the bound, by one step each: a first step that takes more than three plain ones, and a program that begins beside.

Where the time of a plain step is not known yet, two steps are plain behind the first drafted one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from pass_ext.decoding.drafting.step import Step
from pass_ext.decoding.planning.run_times import run_times
from pass_ext.decoding.planning.step_times import StepTimes

_LEAST_SPEED = 0.98
_SHORTEST_TEXT = 96  # tokens: the shortest text for which the bound holds
_SHARE = 1 / _LEAST_SPEED - 1
_FIRST_CREDIT = _SHARE * _SHORTEST_TEXT  # plain steps
_MOST_CREDIT = 2 * _FIRST_CREDIT
_STEPS_OF_A_TRIAL = 2  # behind a pause: a drafter may need one step to begin again
_TRIALS = 4  # steps of one token each: so many the credit covers where rows are chosen by it
_PLAIN_SAMPLES = 2  # steps
_MOST_DISTURBANCE = 2.0  # seconds of one step / those of the last steps


class Pace:
    """The credit of one request's drafts.

    Args:
        share: this pace's part of the credit, where a request has several.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._text = 0
        # credit = tokens - seconds / plain: seconds stay apart because a plain step is timed anew all the time
        self._tokens, self._seconds = share * _FIRST_CREDIT, 0.0
        self._rests = False
        self._loss = 0.0  # of a drafted step that gives one token, in plain steps

    def add(self, tokens: int, drafted: float = 0.0, *, plain: float) -> None:
        """Counts a step.

        Args:
            tokens: how many it gave.
            drafted: its seconds if candidates or slots were in it; 0: a plain step, or another pace's.
            plain: seconds of a plain step.
        """
        before = max(self._text, _SHORTEST_TEXT)
        self._text += tokens
        self._tokens += self._share * _SHARE * (max(self._text, _SHORTEST_TEXT) - before)
        if drafted:
            self._tokens += tokens
            self._seconds += drafted
        most = max(self._share * _MOST_CREDIT, _STEPS_OF_A_TRIAL * self._loss)
        if self._tokens - self._seconds / plain > most:
            self._tokens, self._seconds = most, 0.0

    def most_loss(self, plain: float) -> float:
        """The loss of a step, in plain steps, that the credit covers some times. plain: seconds of a plain step."""
        return max(0.0, self._tokens - self._seconds / plain) / _TRIALS

    def may_draft(self, *, plain: float, step: float) -> bool:
        """True if the next step may draft.

        Args:
            plain: seconds of a plain step.
            step: those of a drafted step.
        """
        self._loss = max(0.0, step / plain - 1)
        credit, needed = self._tokens - self._seconds / plain, self._loss * (_STEPS_OF_A_TRIAL if self._rests else 1)
        self._rests = needed > 0 and credit < needed
        return not self._rests


class Pauses:
    """The paces of a batch: one per request for the drafters that pause together, and one for each that goes on meanwhile.

    Args:
        times: the planned seconds of the target's calls.
        texts: the requests' prompts.
        kinds: True where drafters pause together, False where some go on.
    """

    def __init__(self, times: StepTimes, texts: Sequence[Sequence[int]], kinds: set[bool]) -> None:
        self._times, requests = times, len(texts)
        self._paces = {kind: [Pace(1 / len(kinds)) for _ in range(requests)] for kind in kinds}
        # Rows of the last drafted tree, and seconds of drafting it. Before the first one the smallest tree stands for it.
        self._last = {kind: [(2, 0.0)] * requests for kind in kinds}
        self._has_drafted, self._samples = False, 0
        self._begun: float | None = None
        self._ratios = run_times(times, 1 << max(map(len, texts)).bit_length())

    def begin(self, remaining: Sequence[int]) -> None:
        """Starts a step. remaining: tokens that each request still has to write."""
        self._samples = max(0, self._samples - 1)
        if self._has_drafted and not self._samples and not self._ratios.knows_plain:
            self._samples = _PLAIN_SAMPLES
        self._active = sum(left > 0 for left in remaining)
        self._begun = time.perf_counter()

    def levels(self, levels: Sequence[int], kind: bool, rows: int | None = None) -> list[int]:
        """``levels`` with 0 where drafters of this kind pause. rows: of each request's next step; None: of its last one."""
        if self._samples:
            return [0] * len(levels)
        if not self._has_drafted:  # every text has one trial
            return list(levels)
        plain = self._plain()
        return [
            most if most and pace.may_draft(plain=plain, step=self._seconds_of(rows or last[0], last[1])) else 0
            for most, pace, last in zip(levels, self._paces[kind], self._last[kind], strict=True)
        ]

    def add(self, steps: Sequence[Step | None], gained: Sequence[int], kinds: Sequence[bool]) -> bool:
        """Counts a step: how many tokens each request gained, by drafters of which kind.

        Returns True if steps no longer take the planned time."""
        if self._begun is None:  # the call on the prompts
            return False
        seconds, self._begun = time.perf_counter() - self._begun, None
        trees = [step.tree for step in steps if step is not None]
        total = sum(map(len, trees))
        if not trees:
            return False
        drafting = max(step.candidates.seconds for step in steps if step is not None)
        is_plain = total == len(trees)
        ratio = seconds / (self._times.at(total) + drafting)
        self._ratios.add(total, ratio, is_plain=is_plain)
        # A moment's disturbance is no fault of drafting, and plain steps have such moments too.
        ratio = min(ratio, _MOST_DISTURBANCE * self._ratios.ratio(total))
        self._has_drafted |= not is_plain
        for b, (step, tokens, kind) in enumerate(zip(steps, gained, kinds, strict=True)):
            if step is None:
                continue
            rows, drafted = len(step.tree), 0.0
            if rows > 1 and kind in self._paces:  # tokens that a grammar forces are drafted without a drafter
                self._last[kind][b] = rows, step.candidates.seconds
                drafted = (self._times.at(len(trees) * rows) + step.candidates.seconds) * ratio
            for other, paces in self._paces.items():
                paces[b].add(tokens, drafted if other == kind else 0.0, plain=self._plain())
        return len(steps) == 1 and self._ratios.disagrees()

    def seconds_of(self, rows: int) -> float:
        """Seconds of a step of one text with so many rows, by the last such steps."""
        return self._times.at(rows) * self._ratios.ratio(rows)

    @property
    def most_seconds(self) -> float:
        """Seconds of a step of one text whose loss the credit covers some times."""
        plain = self._times.at(1) * self._ratios.plain_ratio
        return plain * (1 + self._paces[True][0].most_loss(plain))

    def _plain(self) -> float:
        """Seconds of a plain step."""
        return self._times.at(self._active) * self._ratios.plain_ratio

    def _seconds_of(self, rows: int, drafting: float) -> float:
        """Seconds of a step in which every request has so many rows, and drafting takes so long."""
        total = self._active * rows
        return (self._times.at(total) + drafting) * self._ratios.ratio(total)

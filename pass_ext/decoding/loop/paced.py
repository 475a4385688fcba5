"""``PacedLoop``: one text on the CPU, by a device's step of which each call takes what it needs: as few ops as running ahead,
and as few rows as waiting.

    rows of a plan     all where candidates were offered; the root with look-ahead slots where none were
    chosen rows        those in use
    either             the root where drafting pauses, or the next token is the last
"""

from __future__ import annotations

from functools import lru_cache

from pass_ext.decoding.drafting.step import Candidates, Step
from pass_ext.decoding.loop.ahead import AheadLoop
from pass_ext.decoding.session.reading import read_prompts
from pass_ext.tree import Tree


class PacedLoop(AheadLoop):
    """As ``AheadLoop``; drafting may pause by the seconds that steps take."""

    def run_steps(self) -> None:
        """As ``Loop``."""
        texts, plan, pauses = self.texts, self._plan, self._drafting.pauses
        step = self._device_step()
        step.begin(texts.tokens, texts.limits, self._context.sampling)
        if pauses is not None:
            step.price_by(pauses)
        logits, self.calls = read_prompts(self.session, texts.tokens, self._known, plan.prompt_slots)
        step.accept_prompts(logits)
        self._read(step.read(), step)
        while texts.remaining[0]:
            levels = [texts.remaining[0] - 1]
            if pauses is not None:
                pauses.begin(texts.remaining)
                levels = pauses.levels(levels, True, step.rows_needed)
            before, drafts = len(texts.tokens[0]), levels[0] > 0
            rows = step.run_needed(drafts)
            self._read(step.read(), step)
            self.ahead_calls += 1
            gained = len(texts.tokens[0]) - before
            if pauses is not None:
                if pauses.add([_step_of(rows)], [gained], [drafts]):
                    self._context.doubt_measured_times()
                step.price_by(pauses, rows if drafts else 0, gained)
        self.calls += self.ahead_calls


@lru_cache(maxsize=256)
def _step_of(rows: int) -> Step:
    """A step of so many rows; pauses ask for no more."""
    return Step(0, Candidates(Tree.chain(rows - 1), [-1] * (rows - 1)))

"""``PacedLoop``: one text on the CPU, by a fixed step of which each call takes what it needs: as few ops as running ahead, and
as few rows as waiting.

    candidates were offered                          all rows of the plan
    none, but the text may take some                 the root with look-ahead slots
    drafting pauses, or the next token is the last   the root
"""

from __future__ import annotations

from pass_ext.decoding.drafting.step import Candidates, Step
from pass_ext.decoding.loop.ahead import AheadLoop
from pass_ext.decoding.session.reading import read_prompts
from pass_ext.tree import Tree

_ROOT = Tree.chain(0)


class PacedLoop(AheadLoop):
    """As ``AheadLoop``; drafting may pause by the seconds that steps take."""

    def run_steps(self) -> None:
        """As ``Loop``."""
        texts, plan, pauses = self.texts, self._plan, self._drafting.pauses
        whole = Candidates(plan.candidates, [0] * (plan.candidates.num_nodes - 1), groups=plan.groups)
        step = self._fixed_step()
        step.begin([len(text) for text in texts.tokens], texts.limits, self._context.sampling)
        logits, self.calls = read_prompts(self.session, texts.tokens, self._known, plan.prompt_slots)
        step.accept_prompts(logits)
        self._read(step.report.tolist())
        while texts.remaining[0]:
            levels = [texts.remaining[0] - 1]
            if pauses is not None:
                pauses.begin(texts.remaining)
                levels = pauses.levels(levels, True)
            before, drafts = len(texts.tokens[0]), levels[0] > 0
            if drafts and step.has_candidates:
                candidates = whole
                step()
            else:
                slots = plan.prompt_slots if drafts else 0
                candidates = Candidates(_ROOT, groups=((0, slots),) if slots else ())
                step.from_roots(slots)
            self._read(step.report.tolist())
            self.ahead_calls += 1
            gained = len(texts.tokens[0]) - before
            if pauses is not None and pauses.add([Step(0, candidates)], [gained], [drafts]):
                self._context.doubt_measured_times()
        self.calls += self.ahead_calls

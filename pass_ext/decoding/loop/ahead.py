"""``AheadLoop``: steps of one plan, each begun before the host has read the one before.

    device    step 1   step 2   step 3   …           DeviceStep: the rows of a step come from the step before
    host               read 1   read 2   …           texts, ends, streamer, stopping criteria

The texts are those of the loop that waits. A text that ends on the host (an end token, a stopping criterion) is written on for
a step, whose tokens are thrown away; one that ends by its length, ends on the device.
"""

from __future__ import annotations

from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.loop.base import Loop
from pass_ext.decoding.loop.chosen_step import ChosenPlan
from pass_ext.decoding.loop.device_step import DeviceStep, Records
from pass_ext.decoding.loop.fixed_step import FixedPlan
from pass_ext.decoding.loop.reports import Reports
from pass_ext.decoding.loop.synthetic import Synthetic
from pass_ext.decoding.loop.texts import Texts
from pass_ext.decoding.session.opening import Past
from pass_ext.decoding.session.reading import read_prompts
from pass_ext.decoding.session.session import Session


class AheadLoop(Loop):
    """A loop for plans that never change.

    Args:
        context, drafting, texts: as for ``Loop``.
        plan: the rows of every step, or what they are chosen by.
        lag: steps that the host may be behind; None: 1 on CUDA, and 0 on the CPU, where work does not overlap.
        synthetic: accepts in place of the rule; None: the rule does.
    """

    def __init__(
        self,
        context: DraftContext,
        drafting: Drafting,
        texts: Texts,
        plan: FixedPlan | ChosenPlan,
        lag: int | None = None,
        synthetic: Synthetic | None = None,
    ) -> None:
        super().__init__(context, drafting, texts)
        self._synthetic = synthetic
        self._plan = plan
        self._lag = int(context.device.type == "cuda") if lag is None else lag

    def open(self, session: Session | None, past: Past | None) -> None:
        """As ``Loop``."""
        super().open(session, past)
        self.session.is_undisturbed = self.texts.are_silent

    def run_steps(self) -> None:
        """As ``Loop``."""
        texts, session = self.texts, self.session
        step = self._device_step()
        step.begin(texts.tokens, texts.limits, self._context.sampling)
        logits, self.calls = read_prompts(session, texts.tokens, self._known, self._plan.prompt_slots)
        step.accept_prompts(logits)
        reports = Reports(step.report, self._lag + 1)
        reports.send()
        while any(texts.remaining):
            # Every report on its way holds a token or more of each text.
            if len(reports) <= self._lag and any(left > len(reports) for left in texts.remaining):
                step()
                reports.send()
                self.ahead_calls += 1
            elif self._read(reports.read(), step) and any(texts.remaining) and self._lag:
                step.end_at([limit if left else 0 for limit, left in zip(texts.limits, texts.remaining, strict=True)])
        self.surplus_calls = len(reports)
        self.ahead_calls -= self.surplus_calls
        self.calls += self.ahead_calls

    def _read(self, report: list[list[int]], step: DeviceStep) -> bool:
        """Extends the texts by a step's tokens -> True if some text ended."""
        texts, ended = self.texts, False
        for b, (accepted, status, drafted, *more) in enumerate(report):
            if texts.remaining[b]:
                texts.extend(b, more[step.report_numbers - 3 :], accepted, status, drafted)
                ended |= not texts.remaining[b]
        return ended

    def _device_step(self) -> DeviceStep:
        """The step of the plan. A session that records calls has it for the next generation too."""
        session, plan, sampling = self.session, self._plan, self._context.sampling
        if not session.records:
            records: Records = "if possible" if self._context.may_record else "never"
            return plan.step(session, sampling, records=records, synthetic=self._synthetic)
        absent = tuple(value is None for value in sampling.keywords().values())
        chances = self._synthetic and self._synthetic.chances
        key = (plan.key, absent, chances)
        if key not in session.fixed_steps:
            session.fixed_steps[key] = plan.step(session, sampling, records="always", synthetic=self._synthetic)
        step: DeviceStep = session.fixed_steps[key]
        return step

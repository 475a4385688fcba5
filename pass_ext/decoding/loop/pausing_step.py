"""``PausingStep``: the host's step while drafts are made; while drafting pauses the device's of the roots alone, by which
``Plain`` writes: it costs the host less.

    drafts      host_step.py
    a pause     device_step.py, on the same texts, caches and hidden states
"""

from __future__ import annotations

from collections.abc import Sequence

from pass_ext.decoding.loop.device_step import DeviceStep
from pass_ext.decoding.loop.host_step import HostStep
from pass_ext.decoding.loop.loop import Step
from pass_ext.decoding.loop.texts import Report, Texts


class PausingStep(Step):
    """The step of a batch. plain: of the roots alone."""

    def __init__(self, drafting: HostStep, plain: DeviceStep) -> None:
        self._drafting, self._plain = drafting, plain
        self._last: HostStep | DeviceStep = drafting

    @property
    def unread(self) -> int:
        return self._last.unread

    def begin(self, texts: Texts, known: Sequence[int]) -> int:
        self._texts = texts
        return self._drafting.begin(texts, known)

    def __call__(self, *, drafts: bool) -> None:
        step = self._drafting if drafts else self._plain
        if step is not self._last:
            self._last = step
            if drafts:
                self._drafting.resume(self._plain.logits)
            else:
                self._plain.resume(self._texts)
        step(drafts=drafts)
        self.rows = step.rows

    def read(self) -> list[Report]:
        return self._last.read()

    def follow(self, gained: Sequence[int]) -> None:
        self._last.follow(gained)

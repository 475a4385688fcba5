"""``SampledWindows``: training windows of texts that the model drew at one temperature, each from its beginning, so that the
model's law at every place is the law that the token was drawn from. All slots stand where drawn tokens are.
"""

from __future__ import annotations

import dataclasses
import random

import torch

from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.windows import Window, Windows


class SampledWindows(Windows):
    """Draws one text and its anchors for each step."""

    @classmethod
    def at_temperature(cls, windows: Windows, temperature: float) -> SampledWindows:
        """The samples of ``windows`` at this temperature that have a place for every anchor; no documents."""
        fields = {field.name: getattr(windows, field.name) for field in dataclasses.fields(windows)}
        drawn = cls(**{**fields, "documents": []})
        chosen = [
            sample
            for sample in windows.samples
            if sample.temperature == temperature and len(drawn.places(sample)) >= windows.anchors
        ]
        return dataclasses.replace(drawn, samples=chosen)

    def places(self, sample: Sample) -> range:
        """Anchors whose slots stand at drawn tokens, each before another one."""
        return range(sample.prompt_tokens - 1, min(len(sample.ids), self.length) - 1 - self.lookahead)

    def at(self, step: int) -> Window:
        """The window of a step."""
        chooser = random.Random(f"{self.seed} {step}")
        sample = chooser.choice(self.samples)
        anchors = sorted(chooser.sample(self.places(sample), self.anchors))
        return Window(torch.tensor([sample.ids[: self.length]]), torch.tensor([anchors]))

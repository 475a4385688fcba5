"""A trial: slots trained further for some steps, told the uniform numbers that draw the tokens before those that they predict,
or not told; with transition scores, which know these tokens themselves, or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.pages.injection.noise.injection import NoiseInjection
from benchmarks.pages.injection.trial import train_and_judge
from benchmarks.pages.lookahead.slots import Text
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.training.common.windows import Windows
from pass_ext.training.lookahead.loop import Settings

TEMPERATURE = 0.8
"""The temperature of all texts, trained on and judged."""


@dataclass(frozen=True)
class NoiseTrial:
    """rate: of W; 0: slots that are not told. transitions: trained, and judged, with transition scores too."""

    start: str
    transitions: bool
    rate: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """Names the trial's files."""
        told = f"noise-rate-{self.rate:g}" if self.rate else "noise-none"
        return "--".join([self.start, told, "transitions" if self.transitions else "raw", f"seed-{self.seed}"])

    @property
    def alone(self) -> NoiseTrial:
        """The trial of slots that are not told."""
        return NoiseTrial(self.start, self.transitions, seed=self.seed)


def drawn_texts(texts: list[Text]) -> list[Text]:
    """Those drawn at this temperature; the first new token counts as prompt, so that all slots stand where drawn tokens are."""
    return [text._replace(prompt=text.prompt + 1) for text in texts if text.kind == f"T {TEMPERATURE}"]


def run_trial(
    trial: NoiseTrial, model: Any, windows: Windows, settings: Settings, texts: Sequence[Text]
) -> dict[str, Any]:
    """Trains and judges: loss, seconds, and for each way of scoring the hits of each text."""
    embedding = LookaheadEmbedding.from_pretrained(trial.start, table=model.get_input_embeddings().weight).float()
    if not trial.transitions:
        embedding.transition_left = embedding.transition_right = None
    torch.manual_seed(trial.seed)
    injection = None
    if trial.rate:
        injection = NoiseInjection(embedding.num_lookahead, embedding.dim, TEMPERATURE, trial.seed)
    return train_and_judge(model, embedding, injection, trial.rate, windows, settings, texts)

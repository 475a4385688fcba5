"""A trial: slots trained further for some steps, alone or with hidden states of their anchors added, and judged on held-out
texts.

Loss, data, windows and the other parameters' start and rates are the same in all trials of a seed. The judged texts are the
model's own continuations, greedy and at temperature 0.8, of the held-out prompts of `benchmarks.decoding`; those that loop are
left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.pages.injection.hidden import HiddenInjection
from benchmarks.pages.injection.noise.injection import NoiseInjection
from benchmarks.pages.lookahead.slots import Text
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.training.common.windows import Windows
from pass_ext.training.lookahead.evaluation import hits_of
from pass_ext.training.lookahead.loop import LookaheadTrainer, Settings

LAST = 25  # steps; the reported loss is their mean
Injection = HiddenInjection | NoiseInjection


@dataclass(frozen=True)
class Trial:
    """layers: those at whose input hidden states are added; (): slots alone. rank: None for full matrices."""

    start: str
    layers: tuple[int, ...] = ()
    rank: int | None = None
    rate: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """Names the trial's files."""
        size = "full" if self.rank is None else f"rank-{self.rank}"
        places = "-".join(map(str, self.layers))
        added = f"layers-{places}-{size}-rate-{self.rate:g}" if places else "alone"
        return f"{self.start}--{added}--seed-{self.seed}"

    @property
    def alone(self) -> Trial:
        """The trial of slots alone."""
        return Trial(self.start, seed=self.seed)


class InjectionTrainer(LookaheadTrainer):
    """Trains the parameters of ``injection`` beside the slots, clipped on their own, at a rate of their own."""

    def __init__(
        self,
        model: Any,
        embedding: LookaheadEmbedding,
        windows: Windows,
        settings: Settings,
        injection: Injection | None,
        rate: float,
    ) -> None:
        super().__init__(model, embedding, windows, settings)
        self._injection = injection
        if injection is not None:
            self._optimizer.add_param_group({"params": list(injection.parameters()), "lr": rate})
            self._rates.append(rate)

    def loss(self, step: int) -> Tensor:
        """The loss of a step, with the injection."""
        with attached(self._injection, self._model):
            return super().loss(step)


def attached(injection: Injection | None, model: Any) -> AbstractContextManager[None]:
    """``injection.attached(model)``, or nothing without one."""
    return nullcontext() if injection is None else injection.attached(model)


def run_trial(trial: Trial, model: Any, windows: Windows, settings: Settings, texts: Sequence[Text]) -> dict[str, Any]:
    """Trains and judges: loss, seconds, and for each way of scoring the hits of each text."""
    table = model.get_input_embeddings().weight
    embedding = LookaheadEmbedding.from_pretrained(trial.start, table=table).float()
    torch.manual_seed(trial.seed)
    injection = None
    if trial.layers:
        injection = HiddenInjection(trial.layers, embedding.num_lookahead, embedding.dim, trial.rank)
    return train_and_judge(model, embedding, injection, trial.rate, windows, settings, texts)


def train_and_judge(
    model: Any,
    embedding: LookaheadEmbedding,
    injection: Injection | None,
    rate: float,
    windows: Windows,
    settings: Settings,
    texts: Sequence[Text],
) -> dict[str, Any]:
    """Trains in place and judges: new parameters, steps, seconds, loss, and for each way of scoring the hits of each text."""
    trainer = InjectionTrainer(model, embedding, windows, settings, injection, rate)
    started = time.monotonic()
    trainer.run()
    seconds = time.monotonic() - started
    for module in (embedding, injection):  # a file would hold bfloat16
        if module is not None:
            module.to(torch.bfloat16).to(model.get_input_embeddings().weight.dtype)
    judged = {}
    with attached(injection, model):
        if embedding.rank:
            judged["with transitions"] = judge(model, embedding, texts)
            embedding.transition_left = embedding.transition_right = None
        judged["raw"] = judge(model, embedding, texts)
    recent = trainer.losses[-LAST:]
    return {
        "parameters": 0 if injection is None else sum(parameter.numel() for parameter in injection.parameters()),
        "steps": trainer.step,
        "seconds": round(seconds, 1),
        "loss": round(sum(recent) / len(recent), 4),
        "judged": judged,
    }


@torch.no_grad()
def judge(model: Any, embedding: LookaheadEmbedding, texts: Sequence[Text]) -> list[dict[str, Any]]:
    """For each text its places, and sums over them by slot: first candidates that are right, and overlaps."""
    rows = []
    for text in texts:
        places = torch.arange(text.prompt - 2, len(text.ids) - 1 - embedding.num_lookahead)
        hits = hits_of(model, embedding, torch.tensor(text.ids), places)
        right, overlap = (hits.ranks == 0).sum(0).tolist(), hits.overlaps.sum(0).tolist()
        rows.append({"places": len(places), "right": right, "overlap": [round(x, 3) for x in overlap]})
    return rows

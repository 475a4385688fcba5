"""The optimisation of an exit adapter: AdamW on the adapter alone, over rows of hidden states that were computed before.

loss = KL(teacher || draft) over the adapter's vocabulary, both normalised within it, averaged over a step's rows. The rows of a
step depend on the seed and its number alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.early_exit_draft import exit_parts
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.training.common.loss import distillation_loss
from pass_ext.training.common.schedule import rate_at
from pass_ext.training.draft.data import Hidden


@dataclass(frozen=True)
class DraftSettings:
    """What decides the result of a run, beside the data."""

    steps: int
    batch: int
    learning_rate: float
    weight_decay: float
    warm_up: int
    clip: float
    seed: int


def frequent_tokens(tokens: Tensor, count: int, total: int) -> Tensor:
    """The ``count`` ids that ``tokens`` has most often, ascending; ids that it lacks fill up, the lowest first."""
    counts = torch.bincount(tokens.long(), minlength=total)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def rows_of_step(count: int, batch: int, step: int, seed: int) -> Tensor:
    """Which rows a step reads: every row once before any comes again."""
    batch = min(batch, count)
    epoch, place = divmod(step, count // batch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[place * batch : (place + 1) * batch]


class DraftTrainer:
    """Trains ``adapter`` in place on ``hidden``; the model lends its norm and its head."""

    def __init__(self, model: Any, adapter: ExitAdapter, hidden: Hidden, settings: DraftSettings) -> None:
        parts = exit_parts(model)
        self.adapter, self.hidden, self.settings = adapter, hidden, settings
        self.losses: list[float] = []
        self._norm, head = parts.norm, parts.head
        chosen = slice(None) if adapter.vocabulary is None else adapter.vocabulary.long()
        self._table = head.weight.detach()[chosen]
        self._bias = None if head.bias is None else head.bias.detach()[chosen]
        self._optimizer = torch.optim.AdamW(
            adapter.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay
        )

    def loss(self, step: int) -> Tensor:
        """Of one step's rows; its graph reaches the adapter only."""
        device, dtype = self._table.device, self._table.dtype
        settings = self.settings
        picked = rows_of_step(len(self.hidden.final), settings.batch, step, settings.seed)
        behind = self.hidden.behind[self.adapter.layers][picked].to(device, dtype)
        final = self.hidden.final[picked].to(device, dtype)
        weights = torch.full((len(picked),), 1 / len(picked), device=device)
        return distillation_loss(
            [self._norm(self.adapter(behind))],
            [self._table],
            weights,
            teacher_rows=final,
            teacher=torch.arange(len(picked), device=device),
            bias=self._bias,
        )

    def run(self, after_step: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """All steps; ``after_step(steps done, loss)`` is called behind each."""
        settings = self.settings
        while len(self.losses) < settings.steps:
            step = len(self.losses)
            for group in self._optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate_at(step, settings.steps, settings.warm_up)
            loss = self.loss(step)
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), settings.clip)
            self._optimizer.step()
            self.losses.append(loss.item())
            after_step(step + 1, self.losses[-1])

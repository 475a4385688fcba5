"""The optimisation of an exit adapter: AdamW on the adapter alone, over rows of hidden states that were computed before.

loss = KL(teacher || draft) over the adapter's vocabulary, both normalised within it, averaged over a step's rows. The rows of a
step depend on the seed and its number alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.early_exit import exit_parts
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.training.common.loss import distillation_loss
from pass_ext.training.common.trainer import Trainer, rate_at
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


class DraftTrainer(Trainer):
    """Trains ``adapter`` in place on ``hidden``; the model lends its norm and its head."""

    def __init__(self, model: Any, adapter: ExitAdapter, hidden: Hidden, settings: DraftSettings) -> None:
        optimizer = torch.optim.AdamW(
            adapter.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay
        )
        super().__init__(
            adapter,
            optimizer,
            steps=settings.steps,
            schedule=lambda step: rate_at(step, settings.steps, settings.warm_up),
            clip=settings.clip,
        )
        parts = exit_parts(model)
        head, chosen = parts.head, slice(None) if adapter.vocabulary is None else adapter.vocabulary.long()
        self.adapter, self._hidden, self._settings, self._norm = adapter, hidden, settings, parts.norm
        self._table = head.weight.detach()[chosen]
        self._bias = None if head.bias is None else head.bias.detach()[chosen]

    def loss(self, step: int) -> Tensor:
        """The loss of one step's rows."""
        device, dtype = self._table.device, self._table.dtype
        picked = rows_of_step(len(self._hidden.final), self._settings.batch, step, self._settings.seed)
        behind = self._hidden.behind[self.adapter.layers][picked].to(device, torch.float32)  # as the adapter's numbers
        final = self._hidden.final[picked].to(device, dtype)
        weights = torch.full((len(picked),), 1 / len(picked), device=device)
        return distillation_loss(
            [self._norm(self.adapter(behind).to(dtype))],
            [self._table],
            weights,
            teacher_rows=final,
            teacher=torch.arange(len(picked), device=device),
            bias=self._bias,
        )

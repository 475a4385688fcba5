"""The optimisation of a ``DecisionModel``: binary cross-entropy, Adam, shuffled epochs; everything drawn from the seed.

Features are standardised while it learns, and the first layer takes that in at the end, so the file holds a plain MLP.
With ``balanced``, each class weighs as much as the other: w = N / (2 · places of its class).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.modules.decision import DecisionModel
from pass_ext.training.common.trainer import Trainer

_LEAST_DEVIATION = 1e-6  # a feature that varies less says nothing, and is not blown up


def fresh(kind: str, dim: int, *, seed: int, threshold: float, base_model: str, draft_model: str) -> DecisionModel:
    """An untrained model, by the seed; torch's own generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DecisionModel(kind, dim, threshold=threshold, base_model=base_model, draft_model=draft_model)


def class_weights(labels: Tensor) -> Tensor:
    """``[N]``, mean 1: the places of each class, labels 0 and 1, weigh half of all together."""
    positive = labels > 0.5
    count = positive.sum()
    if not 0 < count < len(labels):
        raise ValueError(
            f"all {len(labels)} places have the label {int(count > 0)}: the draft is always right or never, and there is "
            "nothing to decide"
        )
    return torch.where(positive, len(labels) / (2 * count), len(labels) / (2 * (len(labels) - count)))


class DecisionTrainer(Trainer):
    """Trains ``decision`` in place on features ``[N, F]`` and labels ``[N]``, in epochs of shuffled batches."""

    def __init__(
        self,
        decision: DecisionModel,
        features: Tensor,
        labels: Tensor,
        *,
        epochs: int,
        learning_rate: float,
        batch: int,
        seed: int,
        balanced: bool,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(len(features), generator=generator) for _ in range(epochs)]
        self._batches = [picked for order in orders for picked in order.split(batch)]
        super().__init__(decision, torch.optim.Adam(decision.parameters(), lr=learning_rate), steps=len(self._batches))
        self._decision, self._labels = decision, labels
        self._weights = class_weights(labels) if balanced else torch.ones_like(labels)
        deviation = features.std(0, correction=0)
        self._mean, self._deviation = features.mean(0), deviation.where(deviation > _LEAST_DEVIATION, 1.0)
        self._rows = (features - self._mean) / self._deviation

    def loss(self, step: int) -> Tensor:
        """The weighted cross-entropy of one batch."""
        picked = self._batches[step]
        logits = self._decision.logit(self._rows[picked])
        return F.binary_cross_entropy_with_logits(logits, self._labels[picked], self._weights[picked])

    def finish(self) -> None:
        """Lets the first layer take features as they come, and freezes the model."""
        self._decision.standardise(self._mean, self._deviation)
        self._decision.requires_grad_(False)

"""Fits a ``DecisionModel``: binary cross-entropy, Adam, shuffled epochs; everything drawn from the seed.

Features are standardised while it learns, and the first layer takes that in at the end, so the file holds a plain MLP.
With ``balanced``, each class weighs as much as the other: w = N / (2 · places of its class).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.modules.decision import DecisionModel

_LEAST_DEVIATION = 1e-6  # a feature that varies less says nothing, and is not blown up


def fresh(kind: str, dim: int, *, seed: int, threshold: float, base_model: str, draft_model: str) -> DecisionModel:
    """An untrained one, by the seed; torch's own generator stays as it is."""
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


def fit(
    decision: DecisionModel,
    features: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    learning_rate: float,
    batch: int,
    seed: int,
    balanced: bool,
) -> list[float]:
    """Trains ``decision`` in place; the loss of every step."""
    weights = class_weights(labels) if balanced else torch.ones_like(labels)
    mean, deviation = features.mean(0), features.std(0, correction=0)
    deviation = deviation.where(deviation > _LEAST_DEVIATION, 1.0)
    rows = (features - mean) / deviation
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(decision.parameters(), lr=learning_rate)
    losses = []
    for _ in range(epochs):
        for picked in torch.randperm(len(rows), generator=generator).split(batch):
            loss = F.binary_cross_entropy_with_logits(decision.logit(rows[picked]), labels[picked], weights[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    decision.standardise(mean, deviation)
    decision.requires_grad_(False)
    return losses

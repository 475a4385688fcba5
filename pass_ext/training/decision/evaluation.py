"""The held-out evaluation of a decision model: whether it ranks and foretells acceptance, and how much stopping by it saves.

A label y in 0..1 counts as y of a place where drafts are accepted and 1 - y of one where they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.training.decision.chains import Chains, Outcome, with_levels, with_threshold

THRESHOLDS = tuple(tenth / 10 for tenth in range(1, 10))
_BINS = 10


def auc(scores: Tensor, labels: Tensor) -> float | None:
    """The chance that an accepted place scores above one that is not, ties half; None if all places are of one kind."""
    values, place = scores.unique(return_inverse=True)
    positive = torch.zeros(len(values), dtype=torch.float64).index_add_(0, place, labels.double())
    negative = torch.zeros(len(values), dtype=torch.float64).index_add_(0, place, 1 - labels.double())
    pairs = float(positive.sum() * negative.sum())
    return float((positive * (negative.cumsum(0) - negative / 2)).sum()) / pairs if pairs else None


def accuracy(scores: Tensor, labels: Tensor, threshold: float) -> float:
    """The share of places on whose side of the threshold they belong."""
    return float(torch.where(scores > threshold, labels, 1 - labels).double().mean())


def calibration(scores: Tensor, labels: Tensor) -> list[dict[str, float]]:
    """For each tenth of the scores that has places: how many, the mean score, and the mean acceptance."""
    bins = (scores * _BINS).long().clamp(max=_BINS - 1)
    rows = []
    for number in bins.unique().tolist():
        in_bin = bins == number
        rows.append(
            {
                "from": number / _BINS,
                "to": (number + 1) / _BINS,
                "places": int(in_bin.sum()),
                "score": round(float(scores[in_bin].mean()), 4),
                "accepted": round(float(labels[in_bin].mean()), 4),
            }
        )
    return rows


def places_report(scores: Tensor, labels: Tensor, kinds: Sequence[str], threshold: float) -> dict[str, Any]:
    """AUC, accuracy and calibration over all places, and the first two by kind of text."""
    by_kind = {}
    for kind in sorted(set(kinds)):
        of_kind = torch.tensor([place_kind == kind for place_kind in kinds])
        by_kind[kind] = _summary(scores[of_kind], labels[of_kind], threshold)
    return {
        **_summary(scores, labels, threshold),
        "by_kind": by_kind,
        "calibration": calibration(scores, labels),
    }


def _summary(scores: Tensor, labels: Tensor, threshold: float) -> dict[str, Any]:
    area = auc(scores, labels)
    return {
        "places": len(scores),
        "accepted": round(float(labels.mean()), 4),
        "auc": None if area is None else round(area, 4),
        "accuracy": round(accuracy(scores, labels, threshold), 4),
    }


def chains_report(chains: Chains, threshold: float, draft_cost: float) -> dict[str, Any]:
    """Levels drafted, tokens accepted, and both against drafting every level: for thresholds, and for shorter chains."""
    deepest = chains.scores.shape[1]
    whole = with_levels(chains, deepest)

    def row(outcome: Outcome) -> dict[str, float | None]:
        return {
            "levels": round(outcome.levels, 4),
            "tokens": round(outcome.tokens, 4),
            "levels_saved": round(1 - outcome.levels / deepest, 4),
            "tokens_lost": round(1 - outcome.tokens / whole.tokens, 4) if whole.tokens else None,
            "speed": round(speed(outcome, draft_cost), 4),
        }

    return {
        "count": len(chains.scores),
        "levels": deepest,
        "draft_cost": draft_cost,
        "fixed": [row(with_levels(chains, count)) for count in range(1, deepest + 1)],
        "thresholds": [{"threshold": at, **row(with_threshold(chains, at))} for at in sorted({*THRESHOLDS, threshold})],
        "chosen": {"threshold": threshold, **row(with_threshold(chains, threshold))},
    }


def speed(outcome: Outcome, draft_cost: float) -> float:
    """Tokens per time of a target call, if a draft call costs ``draft_cost`` of it."""
    return (1 + outcome.tokens) / (1 + draft_cost * outcome.levels)


def best_threshold(chains: Chains, draft_cost: float) -> float:
    """The threshold of the fastest outcome, to a hundredth; the lowest of equals."""
    hundredths = [number / 100 for number in range(100)]
    return max(hundredths, key=lambda at: speed(with_threshold(chains, at), draft_cost))


def summary(evaluation: dict[str, Any]) -> str:
    """The chosen threshold in one sentence."""
    if not evaluation["places"]:
        return "nothing was held out, so nothing is known of the threshold"
    chosen, levels = evaluation["chains"]["chosen"], evaluation["chains"]["levels"]
    lost = "no token was accepted at all" if chosen["tokens_lost"] is None else f"{chosen['tokens_lost']:.1%} lost"
    return (
        f"threshold {chosen['threshold']:g}: {chosen['levels']:.2f} of {levels} levels drafted ({chosen['levels_saved']:.1%} "
        f"saved), {chosen['tokens']:.2f} tokens accepted ({lost})"
    )

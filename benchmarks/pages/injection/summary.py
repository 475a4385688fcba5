"""Shares of a trial's judged texts, and their differences to slots alone with the standard error.

    share of a slot       s = sum_t x_t / sum_t m_t                         x_t: hits or overlaps in text t, m_t: its places
    difference            D = s - s'                                        s': of slots alone, on the same texts
    its standard error    sqrt(n / (n - 1) sum_t (x_t - x'_t - D m_t)^2) / sum_t m_t

Texts, not places, are independent of each other: n counts texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MEASURES = {"top 1": "right", "overlap": "overlap"}


def summary(judged: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """Shares by slot, and, with ``alone``, differences to it and their standard errors."""
    places = torch.tensor([text["places"] for text in judged], dtype=torch.float64)
    total = places.sum()
    result: dict[str, Any] = {"texts": len(judged), "places": int(total)}
    for measure, key in MEASURES.items():
        sums = torch.tensor([text[key] for text in judged], dtype=torch.float64)
        result[measure] = rounded(sums.sum(0) / total)
        if alone is not None:
            gains = sums - torch.tensor([text[key] for text in alone], dtype=torch.float64)
            mean = gains.sum(0) / total
            spread = (gains - mean * places[:, None]).square().sum(0) * len(judged) / (len(judged) - 1)
            result[f"{measure}, gain"] = rounded(mean)
            result[f"{measure}, standard error"] = rounded(spread.sqrt() / total)
    return result


def rounded(shares: torch.Tensor) -> list[float]:
    """The shares with four digits."""
    return [round(share, 4) for share in shares.tolist()]

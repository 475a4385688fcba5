"""A row of logits as a distribution over the vocabulary:

    allowed mask -> temperature -> top-k -> top-p -> min-p -> renormalise
    p(v) = exp((z_v - max z) / T) / mass   for v in the support, 0 elsewhere; 0 too below e^-86 times the largest

Every filter keeps a prefix of the order (z descending, id ascending), so ties at a boundary keep the lower id:
top-k keeps the first k; top-p the shortest prefix with at least top_p of the mass that top-k left, and at least one token;
min-p the tokens at least min_p times as probable as the first. Temperature 0 is the limit: all mass on the first token.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

BAD_LOGITS, EMPTY_SUPPORT, BAD_TREE = 1, 2, 4  # bits of a status
LEAST_LOG_WEIGHT = -86.0


class Distribution(NamedTuple):
    """Probabilities fp64 [V]. `margin`: the smallest relative change of a probability that would change a filter's decision."""

    probs: Tensor
    status: int
    margin: float


class LogDistribution(NamedTuple):
    """Logarithms of unnormalised probabilities: 0 for the largest, -inf outside the support."""

    log_weights: Tensor
    status: int
    margin: float


def is_allowed(allowed: Tensor, vocabulary: int) -> Tensor:
    """int32 words -> bool [vocabulary]: bit v % 32 of word v / 32."""
    ids = torch.arange(vocabulary)
    return (allowed.long()[ids // 32] >> ids % 32 & 1).bool()


def is_greedy(temperature: float) -> bool:
    """True for temperatures of 0 and below, and for NaN."""
    return not temperature > 0.0


def log_process(
    logits: Tensor,
    allowed: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> LogDistribution:
    """Filters one row of logits [V]. A filter is off at top_k <= 0 or >= V, top_p >= 1 or NaN, min_p <= 0 or NaN."""
    z = logits.double()
    if allowed is not None:
        z = z.where(is_allowed(allowed, len(z)), -math.inf)
    log_zeros = torch.full_like(z, -math.inf)
    if (z.isnan() | (z == math.inf)).any():
        return LogDistribution(log_zeros, BAD_LOGITS, math.inf)
    if (z == -math.inf).all():
        return LogDistribution(log_zeros, EMPTY_SUPPORT, math.inf)
    sorted_z, order = z.sort(descending=True, stable=True)
    if is_greedy(temperature):
        log_zeros[order[0]] = 0.0
        return LogDistribution(log_zeros, 0, math.inf)

    log_weights = (sorted_z - sorted_z[0]) * min(max(1.0 / temperature, 2.0**-96), 2.0**96)
    margin = math.inf
    support = top_k if 0 < top_k < len(z) else len(z)
    if top_p < 1.0:
        weights = log_weights[:support].exp()
        cumulative = weights.cumsum(0) / weights.sum()
        margin = min([math.inf, *(cumulative - top_p).abs()[:-1].tolist()])
        support = min(support, int((cumulative < top_p).sum()) + 1)
    if min_p > 0.0:
        distance = log_weights[:support] - math.log(min(min_p, 1.0))
        margin = min([margin, *distance[sorted_z[:support] < sorted_z[0]].abs().tolist()])
        support = int((distance >= 0.0).sum())
    log_weights[support:] = -math.inf
    return LogDistribution(torch.empty_like(z).scatter_(0, order, log_weights), 0, margin)


def process(logits: Tensor, *filters: Any, **named_filters: Any) -> Distribution:
    """The probabilities of one row of logits, fp64 [V], after the filters of `log_process`; all zero if the status is not 0."""
    log_weights, status, margin = log_process(logits, *filters, **named_filters)
    weights = log_weights.exp().where(log_weights >= LEAST_LOG_WEIGHT, 0.0)
    return Distribution(weights / weights.sum() if status == 0 else weights, status, margin)

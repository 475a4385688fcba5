"""Log probabilities of the tokens that an accept step emitted, and the support that each was drawn from."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.reference.common.distribution import log_process


class Logprobs(NamedTuple):
    """raw and processed fp64 [B, A]; top_tokens int64, top_raw and top_processed fp64 [B, A, count]: the largest logits, the
    lower id first among equals. -inf and -1 where there is no token."""

    raw: Tensor
    processed: Tensor
    top_tokens: Tensor
    top_raw: Tensor
    top_processed: Tensor


def accept_logprobs(
    target_logits: Tensor,
    cu_nodes: Tensor,
    emitted: Tensor,
    path: Tensor,
    count: int = 0,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Logprobs:
    """raw(v) = log_softmax(logits)(v), without mask, temperature and filter; processed(v) = ln p(v). The law of emitted[b, j]
    is that of the row of node path[b, j], whatever the rule.

    target_logits [N, V]; cu_nodes [B + 1]; emitted and path [B, A] as accept_tree returns them; parameters [B]; allowed int32
    words [N, ceil(V / 32)]."""
    raw, processed = (torch.full(emitted.shape, -math.inf, dtype=torch.float64) for _ in range(2))
    top_tokens = torch.full((*emitted.shape, count), -1)
    top_raw, top_processed = (torch.full(top_tokens.shape, -math.inf, dtype=torch.float64) for _ in range(2))
    for b, j in (emitted >= 0).nonzero().tolist():
        row, token = int(cu_nodes[b] + path[b, j]), int(emitted[b, j])
        log_raw = target_logits[row].double().log_softmax(0)
        weights = _log_weights(target_logits, allowed, row, b, temperature, top_k, top_p, min_p)
        log_processed = weights - weights.logsumexp(0)
        raw[b, j], processed[b, j] = log_raw[token], log_processed[token]
        if log_raw.isnan().any():
            continue
        best = target_logits[row].double().sort(descending=True, stable=True).indices[:count]
        best = best[log_raw[best] > -math.inf]
        top_tokens[b, j, : len(best)] = best
        top_raw[b, j, : len(best)], top_processed[b, j, : len(best)] = log_raw[best], log_processed[best]
    return Logprobs(raw, processed, top_tokens, top_raw, top_processed)


def accept_support(
    target_logits: Tensor,
    cu_nodes: Tensor,
    emitted: Tensor,
    path: Tensor,
    room: int,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """counts int32 [B, A] and ids int32 [B, A, room] of the tokens v with p(v) > 0, ascending, then -1; none if they are more
    than `room`. Arguments as in accept_logprobs."""
    counts = torch.zeros(emitted.shape, dtype=torch.int32)
    ids = torch.full((*emitted.shape, room), -1, dtype=torch.int32)
    for b, j in (emitted >= 0).nonzero().tolist():
        row = int(cu_nodes[b] + path[b, j])
        weights = _log_weights(target_logits, allowed, row, b, temperature, top_k, top_p, min_p)
        support = (weights > -math.inf).nonzero().flatten()
        counts[b, j] = len(support)
        if len(support) <= room:
            ids[b, j, : len(support)] = support
    return counts, ids


def _log_weights(
    target_logits: Tensor,
    allowed: Tensor | None,
    row: int,
    request: int,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """ln of the unnormalised probabilities of a row, under a request's parameters."""
    return log_process(
        target_logits[row],
        None if allowed is None else allowed[row],
        0.0 if temperature is None else float(temperature[request]),
        0 if top_k is None else int(top_k[request]),
        1.0 if top_p is None else float(top_p[request]),
        0.0 if min_p is None else float(min_p[request]),
    ).log_weights

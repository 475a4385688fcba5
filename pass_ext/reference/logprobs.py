"""Log probabilities of the tokens that an accept step emitted, in plain PyTorch:

    raw(v)        log_softmax(logits)(v)    no mask, temperature or filter
    processed(v)  ln p(v)                   p after mask, temperature and filters: the distribution that the rule draws from

The law of ``emitted[b, j]`` is that of the row of node ``path[b, j]``, whatever the rule.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.reference.distribution import log_process


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
    """target_logits [N, V]; cu_nodes [B + 1]; emitted and path [B, A] as accept_tree returns them; parameters [B]; allowed
    int32 words [N, ceil(V / 32)]."""
    raw, processed = (torch.full(emitted.shape, -math.inf, dtype=torch.float64) for _ in range(2))
    top_tokens = torch.full((*emitted.shape, count), -1)
    top_raw, top_processed = (torch.full(top_tokens.shape, -math.inf, dtype=torch.float64) for _ in range(2))
    for b, j in (emitted >= 0).nonzero().tolist():
        row, token = int(cu_nodes[b] + path[b, j]), int(emitted[b, j])
        log_raw = target_logits[row].double().log_softmax(0)
        weights = log_process(
            target_logits[row],
            None if allowed is None else allowed[row],
            0.0 if temperature is None else float(temperature[b]),
            0 if top_k is None else int(top_k[b]),
            1.0 if top_p is None else float(top_p[b]),
            0.0 if min_p is None else float(min_p[b]),
        ).log_weights
        log_processed = weights - weights.logsumexp(0)
        raw[b, j], processed[b, j] = log_raw[token], log_processed[token]
        if log_raw.isnan().any():
            continue
        best = target_logits[row].double().sort(descending=True, stable=True).indices[:count]
        best = best[log_raw[best] > -math.inf]
        top_tokens[b, j, : len(best)] = best
        top_raw[b, j, : len(best)], top_processed[b, j, : len(best)] = log_raw[best], log_processed[best]
    return Logprobs(raw, processed, top_tokens, top_raw, top_processed)

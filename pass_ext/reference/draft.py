"""``draft_sample`` in plain PyTorch: candidates from rows of logits. p: distribution.py, E: noise.py.

    coupled  the k largest of ln p(v) - ln E_v, where E is the target's noise for the seed and position: the first is the
             token that the target would draw
    without  the same with the draft's own noise: k draws without replacement, in the order of drawing
    with     k independent draws
    top      the k most probable

Temperature 0 is the limit in every mode: tokens in the order of their logits, and the first has all the probability.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.reference.common.distribution import is_greedy, log_process
from pass_ext.reference.common.noise import Purpose, exponentials


class Drafts(NamedTuple):
    """tokens int64 [R, k], -1 beyond the support and in a row that is no distribution; logprobs fp64 [R, k], -inf there;
    margin fp64 [R]: the smallest gap between two scores that decided the order, or a filter's margin if that is smaller."""

    tokens: Tensor
    logprobs: Tensor
    margin: Tensor


def best(scores: Tensor, count: int) -> tuple[Tensor, float]:
    """The ids of the `count` largest scores above -inf, and the smallest gap between one of them and the next score."""
    values, ids = scores.sort(descending=True, stable=True)
    values, ids = values[values > -math.inf], ids[values > -math.inf]
    return ids[:count], min([math.inf, *(values[:-1] - values[1:])[:count].tolist()])


def draft_sample(
    logits: Tensor,
    k: int,
    *,
    mode: str = "without",
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    nodes: Tensor | None = None,
) -> Drafts:
    """logits [R, V]; parameters, seeds, positions and nodes [R]; allowed int32 [R, ceil(V / 32)].
    A temperature of None is 0 in mode coupled and 1 in the others."""
    rows, vocabulary = logits.shape
    tokens = torch.full((rows, k), -1)
    logprobs = torch.full((rows, k), -math.inf, dtype=torch.float64)
    margin = torch.full((rows,), math.inf, dtype=torch.float64)
    coupled, draws = mode == "coupled", range(k if mode == "with" else 1)
    for row in range(rows):
        heat = (0.0 if coupled else 1.0) if temperature is None else float(temperature[row])
        greedy = is_greedy(heat)
        mask = None if allowed is None else allowed[row]
        if greedy:  # filters do not change the order of the logits
            distribution = log_process(logits[row], mask)
        else:
            distribution = log_process(
                logits[row],
                mask,
                heat,
                top_k=0 if top_k is None else int(top_k[row]),
                top_p=1.0 if top_p is None else float(top_p[row]),
                min_p=0.0 if min_p is None else float(min_p[row]),
            )
        if distribution.status != 0:
            continue

        log_probs = distribution.log_weights - distribution.log_weights.logsumexp(0)
        if greedy or mode == "top":  # compares the logits themselves: log_probs may round to ties
            ranked = [
                best(logits[row].double().where(log_probs > -math.inf, -math.inf), k // len(draws))[0] for _ in draws
            ]
            margin[row] = distribution.margin
        else:
            purpose = Purpose.coupled if coupled else Purpose.draft
            node = 0 if coupled or nodes is None else int(nodes[row])
            key = int(seeds[row]), int(positions[row]), purpose, vocabulary, node
            races = [best(log_probs - exponentials(*key, draw).log(), k // len(draws)) for draw in draws]
            ranked = [ids for ids, _ in races]
            margin[row] = min([distribution.margin, *(gap for _, gap in races)])
        ids = torch.cat(ranked)
        tokens[row, : len(ids)] = ids
        logprobs[row, : len(ids)] = log_probs[ids]
        if greedy:
            logprobs[row, : len(ids)] = -math.inf
            logprobs[row, : len(ids) if mode == "with" else 1] = 0.0
    return Drafts(tokens, logprobs, margin)

"""The held-out evaluation of a decision model: whether it ranks and foretells acceptance, and how much stopping by it saves.

A label y in 0..1 counts as y of a place where drafts are accepted and 1 - y of one where they are not.

Levels saved and tokens lost by stopping: a chain of D levels from a place; level i is accepted with chance a_i (its token is
the target's greedy one, or min(1, p/q) of the token drawn), so n levels give Σ_{i<n} a_0 ⋯ a_i tokens. With a threshold, level
i + 1 is drafted while the score of level i is above it. All chains of a text hang from its tokens in one tree: a call of the
draft per level, one of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.modules.decision import DecisionModel
from pass_ext.training.decision.loop import Pair, Text, drafted
from pass_ext.tree import Tree

THRESHOLDS = tuple(tenth / 10 for tenth in range(1, 10))
_BINS = 10


class Chains(NamedTuple):
    """C chains of D levels; on the CPU."""

    scores: Tensor
    """``[C, D]``, of the row that each level was drafted from."""
    accepted: Tensor
    """``[C, D]``, a_i."""


def read_chains(
    pair: Pair, texts: Iterable[Text], decision: DecisionModel, *, levels: int, temperature: float, seed: int
) -> Chains:
    """Chains from all places of the texts; a text and its chains are ``MAX_TREE_NODES`` rows at most."""
    chains = [_chains_of(pair, text, decision, levels, temperature, seed + at) for at, text in enumerate(texts)]
    if not chains:
        return Chains(torch.empty(0, levels), torch.empty(0, levels))
    return Chains(torch.cat([chain.scores for chain in chains]), torch.cat([chain.accepted for chain in chains]))


def _chains_of(pair: Pair, text: Text, decision: DecisionModel, levels: int, temperature: float, seed: int) -> Chains:
    parents, tokens, rows = list(range(-1, len(text.ids) - 1)), text.ids, text.places
    read, scores, drafts = [], [], []
    for level in range(levels):
        logits, hidden = pair.draft(Tree(parents), tokens, rows)
        drafted_level = drafted(logits, hidden, level + 1, temperature, nodes=rows.int().to(logits.device), seed=seed)
        scores.append(decision(drafted_level).cpu())
        drafts.append((drafted_level.tokens[:, 0].cpu(), drafted_level.logprobs[:, 0].cpu()))
        read.append(rows)
        parents += rows.tolist()
        tokens = torch.cat([tokens, drafts[-1][0].clamp(min=0)])
        rows = torch.arange(len(tokens) - len(text.places), len(tokens))
    verified = len(tokens) - len(text.places)  # the target's answer to the last level is not needed
    logits, _ = pair.target(Tree(parents[:verified]), tokens[:verified], torch.cat(read))
    accepted = [
        _accepted(rows, *drafts[level], temperature) for level, rows in enumerate(logits.split(len(text.places)))
    ]
    return Chains(torch.stack(scores, 1), torch.stack(accepted, 1))


def _accepted(target: Tensor, tokens: Tensor, logprobs: Tensor, temperature: float) -> Tensor:
    target = target.float().cpu()
    in_vocabulary = (tokens >= 0) & (tokens < target.shape[1])
    if temperature == 0:
        return ((target.argmax(-1) == tokens) & in_vocabulary).float()
    log_probabilities = (target / temperature).log_softmax(-1)
    ratio = log_probabilities.gather(1, tokens.where(in_vocabulary, 0)[:, None])[:, 0] - logprobs
    return ratio.exp().clamp(max=1.0).where(in_vocabulary, 0.0)


class Outcome(NamedTuple):
    """Means over chains under a rule of stopping."""

    levels: float
    """Levels drafted."""
    tokens: float
    """Tokens accepted."""


def with_threshold(chains: Chains, threshold: float) -> Outcome:
    """Drafting goes on while the score is above the threshold."""
    going = (chains.scores[:, :-1] > threshold).long().cumprod(1).sum(1)
    return _outcome(chains, going + 1)


def with_levels(chains: Chains, levels: int) -> Outcome:
    """The same number of levels for every chain."""
    return _outcome(chains, torch.full((len(chains.scores),), levels))


def _outcome(chains: Chains, levels: Tensor) -> Outcome:
    reached = chains.accepted.double().cumprod(1)
    is_drafted = torch.arange(reached.shape[1]) < levels[:, None]
    return Outcome(float(levels.double().mean()), float((reached * is_drafted).sum(1).mean()))


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

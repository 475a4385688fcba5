"""Levels saved and tokens lost by stopping: chains drafted from places of held-out text, with a score at each level.

A chain of D levels from a place; level i is accepted with chance a_i (its token is the target's greedy one, or min(1, p/q) of
the token drawn), so n levels give Σ_{i<n} a_0 ⋯ a_i tokens. With a threshold, level i + 1 is drafted while the score of level i
is above it. All chains of a text hang from its tokens in one tree: a call of the draft per level, one of the target.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.modules.decision import DecisionModel
from pass_ext.training.decision.rows import Pair, Text, drafted
from pass_ext.tree import Tree


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
    judged = len(tokens) - len(text.places)  # the target's answer to the last level is not needed
    logits, _ = pair.target(Tree(parents[:judged]), tokens[:judged], torch.cat(read))
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

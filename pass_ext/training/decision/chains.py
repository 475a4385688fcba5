"""What stopping saves: chains drafted from places of held-out text, level by level, with the decision's score at each.

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
    found = [_chains_of(pair, text, decision, levels, temperature, seed + at) for at, text in enumerate(texts)]
    if not found:
        return Chains(torch.empty(0, levels), torch.empty(0, levels))
    return Chains(torch.cat([one.scores for one in found]), torch.cat([one.accepted for one in found]))


def _chains_of(pair: Pair, text: Text, decision: DecisionModel, levels: int, temperature: float, seed: int) -> Chains:
    parents, tokens, rows = list(range(-1, len(text.ids) - 1)), text.ids, text.places
    asked, scores, drafts = [], [], []
    for level in range(levels):
        logits, hidden = pair.draft(Tree(parents), tokens, rows)
        made = drafted(logits, hidden, level + 1, temperature, nodes=rows.int().to(logits.device), seed=seed)
        scores.append(decision(made).cpu())
        drafts.append((made.tokens[:, 0].cpu(), made.logprobs[:, 0].cpu()))
        asked.append(rows)
        parents += rows.tolist()
        tokens = torch.cat([tokens, drafts[-1][0].clamp(min=0)])
        rows = torch.arange(len(tokens) - len(text.places), len(tokens))
    kept = len(tokens) - len(text.places)  # the target's answer to the last level is not needed
    logits, _ = pair.target(Tree(parents[:kept]), tokens[:kept], torch.cat(asked))
    accepted = [_accepted(law, *drafts[level], temperature) for level, law in enumerate(logits.split(len(text.places)))]
    return Chains(torch.stack(scores, 1), torch.stack(accepted, 1))


def _accepted(target: Tensor, tokens: Tensor, logprobs: Tensor, temperature: float) -> Tensor:
    target = target.float().cpu()
    there = (tokens >= 0) & (tokens < target.shape[1])
    if temperature == 0:
        return ((target.argmax(-1) == tokens) & there).float()
    law = (target / temperature).log_softmax(-1)
    ratio = law.gather(1, tokens.where(there, 0)[:, None])[:, 0] - logprobs
    return ratio.exp().clamp(max=1.0).where(there, 0.0)


class Outcome(NamedTuple):
    """Of a rule of stopping, means over chains."""

    levels: float
    """Levels drafted."""
    tokens: float
    """Tokens accepted."""


def with_threshold(chains: Chains, threshold: float) -> Outcome:
    """Drafting goes on while the score is above the threshold."""
    going = (chains.scores[:, :-1] > threshold).long().cumprod(1).sum(1)
    return _outcome(chains, going + 1)


def with_levels(chains: Chains, levels: int) -> Outcome:
    """Always as many levels."""
    return _outcome(chains, torch.full((len(chains.scores),), levels))


def _outcome(chains: Chains, levels: Tensor) -> Outcome:
    reached = chains.accepted.double().cumprod(1)
    drafted_too = torch.arange(reached.shape[1]) < levels[:, None]
    return Outcome(float(levels.double().mean()), float((reached * drafted_too).sum(1).mean()))

"""``SyntheticAcceptance``: accepts drafted tokens by coins of given rates, whatever the model says, so that speed can be
measured apart from the quality of drafts. The texts have no distribution worth a name: never exact, never for use.

    spine      the nodes from a tree's root to its deepest drafted token, the first of equals
    accepted   nodes of the spine, each with the rate of its depth if those before it were accepted
    then       the token that the target draws after them

A coin is a draw of ``draft_sample`` from (rate, 1 - rate). It depends on seed and position alone, and a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction, VerifiedRows
from pass_ext.decoding.requests.processors import Processor
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.draft import draft_sample


class SyntheticAcceptance(AcceptFunction):
    """For measurements of speed alone: ``generate(..., rule=SyntheticAcceptance(0.8))``. The texts are worthless, and
    ``stats.synthetic`` says so.

    Args:
        rates: one number: the probability of every drafted token, if the one before it was accepted. Several, as in vLLM's
            ``synthetic_acceptance_rates``: the share of steps that accept a token at depth 1, 2, …, none larger than the one
            before.
    """

    name: str = "coupled"
    is_synthetic: ClassVar[bool] = True

    def __init__(self, rates: float | Sequence[float]) -> None:
        self.rates = _checked(rates)
        self._coins: dict[tuple[int, torch.device], Tensor] = {}  # kept: a CUDA graph reads them where they are

    def __repr__(self) -> str:
        return f"SyntheticAcceptance({self.rates if isinstance(self.rates, float) else list(self.rates)})"

    def check(self, processors: Sequence[Processor], grammar: Any) -> None:
        if grammar is not None:
            raise ValueError(
                f"generate: rule must be a name with a grammar, whose texts the coins would leave, got {self!r}"
            )

    def chances(self, depth: int) -> list[float]:
        """For each depth the probability that a drafted token is accepted if the one before it was."""
        if isinstance(self.rates, float):
            return [self.rates] * depth
        shares = pairwise([1.0, *self.rates])
        chances = [share / before if before > 0.0 else 0.0 for before, share in shares]
        return [*chances, *[0.0] * depth][:depth]

    def accept(self, rows: VerifiedRows) -> AcceptResult:
        first = rows.trees.cu_nodes[:-1].long()
        return self.along(rows.logits, rows.tokens, _spines(rows), first, rows.positions, rows.sampling)

    def along(
        self,
        logits: Tensor,
        tokens: Tensor,
        spines: Tensor,
        first_rows: Tensor,
        positions: Tensor,
        sampling: BatchSampling,
    ) -> AcceptResult:
        """Accepts on given paths.

        Args:
            logits: ``[N, V]``.
            tokens: ``[N]``, of the rows; one outside [0, V) is not accepted.
            spines: ``[B, A]`` int64, nodes of each request from its root 0 on, then -1; all -1: a padded request.
            first_rows: ``[B]``, the rows of the roots.
            positions: ``[B]``, the text position of the next token.
        """
        (requests, width), device = spines.shape, logits.device
        depth = width - 1
        coins = self._coins.get((depth, device))
        if coins is None:
            chances = torch.tensor(self.chances(depth), dtype=torch.float64)
            coins = torch.stack([chances.log(), (1 - chances).log()], 1).float().to(device)
            self._coins[depth, device] = coins
        seeds = torch.arange(requests, device=device) if sampling.seeds is None else sampling.seeds
        rows = (first_rows[:, None] + spines.clamp(min=0)).clamp(max=len(logits) - 1)
        place = torch.arange(width, device=device)
        places = positions[:, None] + place
        heads = draft_sample(
            coins.repeat(requests, 1),
            1,
            temperature=1.0,
            seeds=seeds.repeat_interleave(depth, output_size=requests * depth),
            positions=places[:, 1:].flatten(),
        )[0].view(requests, -1)
        drafts = tokens[rows[:, 1:]]
        accepts = (heads == 0) & (spines[:, 1:] >= 0) & (drafts >= 0) & (drafts < logits.shape[1])
        count = accepts.long().cumprod(1).sum(1, keepdim=True)
        last, _ = draft_sample(
            logits[rows.gather(1, count)[:, 0]],
            1,
            mode="coupled",
            positions=places.gather(1, count)[:, 0],
            **sampling.keywords(),
        )
        drafted = torch.nn.functional.pad(drafts, (0, 1))
        emitted = drafted.where(place < count, last).masked_fill(place > count, -1)
        is_there = spines[:, :1] >= 0
        return AcceptResult(
            emitted.where(is_there, -1),
            spines.masked_fill(place > count, -1).int(),
            (count * is_there)[:, 0].int(),
            torch.zeros_like(count[:, 0], dtype=torch.int32),
        )


def _spines(verified: VerifiedRows) -> Tensor:
    """``[B, depth + 1]`` int64: each request's nodes from the root to its deepest drafted token, then -1."""
    tokens, trees, depth, vocabulary = verified.tokens, verified.trees, verified.depth, verified.logits.shape[1]
    nodes = torch.arange(trees.max_nodes, device=tokens.device)
    rows = trees.rows_of_nodes
    there = nodes < trees.cu_nodes.diff()[:, None]
    depths, came = trees.depths[rows].long(), tokens[rows]
    deepest = depths.where(there & (came >= 0) & (came < vocabulary), 0).argmax(1, keepdim=True)
    above = trees.seen(rows.gather(1, deepest)[:, 0])
    places = depths.where(there & above, depth + 1).clamp(max=depth + 1)
    spines = torch.full((len(rows), depth + 2), -1, device=tokens.device)
    return spines.scatter(1, places, nodes.expand_as(places))[:, : depth + 1]


def _checked(rates: Any) -> float | tuple[float, ...]:
    several = isinstance(rates, Sequence) and not isinstance(rates, (str, bytes))
    each = list(rates) if several else [rates]
    if any(isinstance(rate, bool) or not isinstance(rate, (int, float)) for rate in each):
        raise TypeError(f"SyntheticAcceptance: rates must be a rate, or one for each depth, got {rates!r}")
    if not each or not all(0.0 <= rate <= 1.0 for rate in each):
        raise ValueError(f"SyntheticAcceptance: rates must be in [0, 1], got {rates!r}")
    if any(later > earlier for earlier, later in pairwise(each)):
        raise ValueError(f"SyntheticAcceptance: rates must not rise with the depth, got {rates!r}")
    return tuple(map(float, each)) if several else float(rates)

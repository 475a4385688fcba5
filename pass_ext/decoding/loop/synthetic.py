"""``Synthetic``: accepts drafted tokens by coins of given rates, whatever the model says, so that speed can be measured apart
from the quality of drafts. The texts have no distribution worth a name: never exact, never for use.

    spine      the nodes from a tree's root to its deepest leaf, the first of equals
    accepted   nodes of the spine, each with the rate of its depth if those before it were accepted
    then       the token that the target draws behind them

A coin is a draw of ``draft_sample`` from (rate, 1 - rate). It depends on seed and position alone, and a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.draft import draft_sample
from pass_ext.tree import Tree

Rates = float | Sequence[float]
"""One number: the probability of every drafted token, if the one before it was accepted. Several, as in vLLM's
``synthetic_acceptance_rates``: the share of steps that accept a token at depth 1, 2, …, none larger than the one before."""


def spine_of(tree: Tree) -> list[int]:
    """The nodes from the root to the deepest leaf, the first of equals."""
    depths = tree.depths[: tree.num_nodes]
    return list(tree.path(depths.index(max(depths))))


class Synthetic:
    """Synthetic acceptance of one generation.

    Args:
        rates: see ``Rates``.
        device: of the batch's tensors.
        depth: of the deepest draft.
    """

    def __init__(self, rates: Rates, device: torch.device, depth: int) -> None:
        self.chances = tuple(conditional_rates(rates, depth))
        """The rate of each depth, if the token before was accepted."""
        chances = torch.tensor(self.chances, dtype=torch.float64)
        self._coins = torch.stack([chances.log(), (1 - chances).log()], 1).float().to(device)

    def accept(
        self,
        logits: Tensor,
        tokens: Tensor,
        spines: Tensor,
        first_rows: Tensor,
        positions: Tensor,
        sampling: BatchSampling,
    ) -> AcceptResult:
        """An ``AcceptResult`` like that of ``accept_tree``.

        Args:
            logits: ``[N, V]``.
            tokens: ``[N]``, of the rows; one outside [0, V) is not accepted.
            spines: ``[B, A]`` int64, nodes of each request from its root 0 on, then -1; all -1: a padded request.
            first_rows: ``[B]``, the rows of the roots.
            positions: ``[B]``, the text position of the next token.
        """
        requests, width = spines.shape
        seeds = torch.arange(requests, device=positions.device) if sampling.seeds is None else sampling.seeds
        rows = (first_rows[:, None] + spines.clamp(min=0)).clamp(max=len(logits) - 1)
        places = positions[:, None] + torch.arange(width, device=positions.device)
        heads = draft_sample(
            self._coins[: width - 1].repeat(requests, 1),
            1,
            temperature=1.0,
            seeds=seeds.repeat_interleave(width - 1, output_size=requests * (width - 1)),
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
        place = torch.arange(width, device=positions.device)
        drafted = torch.nn.functional.pad(drafts, (0, 1))
        emitted = drafted.where(place < count, last).masked_fill(place > count, -1)
        is_there = spines[:, :1] >= 0
        return AcceptResult(
            emitted.where(is_there, -1),
            spines.masked_fill(place > count, -1).int(),
            (count * is_there)[:, 0].int(),
            torch.zeros_like(count[:, 0], dtype=torch.int32),
        )


def conditional_rates(rates: Rates, depth: int) -> list[float]:
    """For each depth the probability that a drafted token is accepted if the one before it was."""
    came: Any = rates
    each = came if isinstance(came, Sequence) and not isinstance(came, (str, bytes)) else [came]
    if any(isinstance(rate, bool) or not isinstance(rate, (int, float)) for rate in each):
        raise TypeError(f"generate: synthetic must be a rate, or one for each depth, got {rates!r}")
    shares = [float(rate) for rate in rates] if isinstance(rates, Sequence) else [float(rates)]
    if not shares or not all(0.0 <= share <= 1.0 for share in shares):
        raise ValueError(f"generate: synthetic must be rates in [0, 1], got {rates!r}")
    if not isinstance(rates, Sequence):
        return shares * depth
    if any(later > earlier for earlier, later in pairwise(shares)):
        raise ValueError(f"generate: synthetic must be rates that do not rise with the depth, got {rates!r}")
    chances = [share / before if before > 0.0 else 0.0 for before, share in pairwise([1.0, *shares])]
    return [*chances, *[0.0] * depth][:depth]

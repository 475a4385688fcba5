"""``Transition``: what the scores of a draft owe to the token in front of it. DSpark's Markov head and DFlash-2's selector.

    scores[v] = logits[v] + (left[token in front] ∘ gate(h)) · right[v]

h is the draft's row after the final norm. Without a gate that factor is 1. The selector offers the tokens with the best logits
alone; all others have -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.ops.linear import linear_rows


class Transition(NamedTuple):
    """The tables of a transition."""

    left: Tensor
    """``[V, r]``, by the target's tokens."""
    right: Tensor
    """``[Vd, r]``, by the draft's."""
    gate: Tensor | None = None
    """``[r, d]``."""
    offers: int | None = None
    """How many tokens have scores; None: all."""

    def scores(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """``[n, Vd]``.

        Args:
            logits: ``[n, Vd]``.
            hidden: ``[n, d]``, the rows that these are of.
            before: ``[n]``, the tokens in front.
        """
        if self.offers is None:
            return logits + linear_rows(self.latent(before, hidden), self.right)
        best, tokens = logits.float().topk(min(self.offers, logits.shape[1]), -1)
        best = best + self.among(tokens, self.latent(before, hidden))
        return torch.full_like(logits, -torch.inf, dtype=torch.float32).scatter(1, tokens, best)

    def latent(self, before: Tensor, hidden: Tensor) -> Tensor:
        """``[..., r]``, the factor of ``right``. before: ``[...]``. hidden: ``[..., d]``."""
        rows = F.embedding(before.clamp(0, len(self.left) - 1), self.left)  # -1: no token
        return rows if self.gate is None else rows * linear_rows(hidden, self.gate)

    def among(self, tokens: Tensor, latent: Tensor) -> Tensor:
        """What is added to the logits of some tokens ``[..., K]`` of the draft: float32 ``[..., K]``."""
        return (F.embedding(tokens, self.right).float() * latent.float().unsqueeze(-2)).sum(-1)

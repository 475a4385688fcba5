"""Compares two greedy texts: they must be equal, or first differ at a tie.

In fp32 texts are equal. In bf16 the rounding of a call depends on its number of rows. If two tokens' logits are almost equal,
either token may win, and from there on the texts differ:

    tie: |logit(a) - logit(b)| <= TIE * 2 ^ (floor(log2 of the largest |logit|) - 7)      logits in fp32, by the same weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

TIE = 8  # units in the last place of bf16: the rounding errors of all layers, and a margin


class Agreement(NamedTuple):
    """The length of the common beginning of two texts, and the tie behind it."""

    same: int
    """The number of tokens before the first that differs."""
    gap: float | None
    """The difference of the two tokens' logits there; None if the texts are equal."""

    def __str__(self) -> str:
        if self.gap is None:
            return "same text"
        return f"tie at token {self.same} ({self.gap:.2f})"


def agreement(
    text: Sequence[int], other: Sequence[int], who: str, logits_behind: Callable[[Sequence[int]], Tensor]
) -> Agreement:
    """The agreement of two texts; raises AssertionError if they differ without a tie.

    Args:
        text, other: new tokens, without the prompt.
        who: the method that wrote ``other``, for the message.
        logits_behind: gives the fp32 logits ``[V]`` of the token that follows some new tokens.
    """
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    if same == len(text) == len(other):
        return Agreement(same, None)
    if same in (len(text), len(other)):
        raise AssertionError(f"{who} made {len(other)} tokens and Plain {len(text)}, the first {same} of them the same")
    logits = logits_behind(text[:same])
    first, second = (logits[tokens[same]].item() for tokens in (text, other))
    gap, limit = abs(first - second), TIE * bf16_step(logits.abs().max().item())
    if not gap <= limit:
        raise AssertionError(
            f"{who} differs from Plain at token {same}: {other[same]} instead of {text[same]}, and that is no tie: "
            f"their logits are {second:.3f} and {first:.3f}, a tie is up to {limit:.3f}"
        )
    return Agreement(same, gap)


def bf16_step(size: float) -> float:
    """The distance of neighbouring bf16 numbers at this size."""
    return 2.0 ** (math.frexp(size)[1] - 8)  # size = mantissa * 2 ^ exponent, mantissa from 1/2 to 1

"""Acceptance statistics, with the names and definitions of vLLM's speculative decoding metrics.

    mean acceptance length = 1 + accepted tokens / drafts        draft acceptance rate = accepted tokens / drafted tokens

A draft is a step of one request that verified at least one drafted token. Tokens accepted behind a text's end (its limit, an
end token, a stopping criterion) are thrown away and not counted. Counts stay on the device until they are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AcceptanceStats:
    """Acceptance counts of one or more generations. Without drafts: mean length 1, rates 0."""

    acceptance_histogram: tuple[int, ...] = (0,)
    """Drafts by their number of accepted tokens: 0, 1, 2, ..."""
    num_draft_tokens: int = 0
    """Drafted tokens that were verified: the nodes of the trees without roots and look-ahead slots."""

    @property
    def num_drafts(self) -> int:
        """Steps that verified at least one drafted token, counted once per request."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were accepted, without the token that the target adds."""
        return sum(count * steps for count, steps in enumerate(self.acceptance_histogram))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per draft, including the token that the target adds."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted out of drafted tokens. In a tree at most one of a node's children can be accepted."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Drafts that accepted a token at depth 1, 2, ..."""
        return tuple(reversed(tuple(accumulate(reversed(self.acceptance_histogram[1:])))))

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """``accepted_per_position`` divided by the number of drafts."""
        return tuple(count / max(1, self.num_drafts) for count in self.accepted_per_position)

    def as_dict(self) -> dict[str, Any]:
        """Every number by its name, for JSON."""
        names = (
            "num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_acceptance_length", "draft_acceptance_rate",
            "acceptance_histogram", "accepted_per_position", "acceptance_rate_per_position",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        if type(other) is not AcceptanceStats:
            return NotImplemented
        return AcceptanceStats(*_summed(self, other))


@dataclass(frozen=True)
class GenerationStats(AcceptanceStats):
    """Statistics of one generation, or of several added up: rates are computed from the sums."""

    model_calls: int = 0
    """Calls of the model, the prompt's included; a call serves all requests of a batch."""
    tokens: int = 0
    """New tokens of all requests together."""
    seconds: float = 0.0
    ahead_calls: int = 0
    """Calls whose rows the device made from those of the call before; 0: the host made the rows of every call."""
    surplus_calls: int = 0
    """Calls that were under way when the last text ended; not among ``model_calls``."""
    synthetic: bool = False
    """True: coins of given rates accepted the drafts (``generate(synthetic=...)``): the texts are not the model's."""
    way: str = ""
    """How the model computed calls of few rows: "own forward", by pass_ext's ops alone, or "as it is" and why."""

    @classmethod
    def of(
        cls,
        acceptance: AcceptanceStats,
        *,
        model_calls: int,
        tokens: int,
        seconds: float,
        ahead_calls: int = 0,
        surplus_calls: int = 0,
        synthetic: bool = False,
        way: str = "",
    ) -> GenerationStats:
        """Acceptance counts together with calls, tokens and seconds."""
        counts = acceptance.acceptance_histogram, acceptance.num_draft_tokens
        return cls(*counts, model_calls, tokens, seconds, ahead_calls, surplus_calls, synthetic, way)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests together per second; 0 where no time passed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_call(self) -> float:
        """Tokens of all requests together per call; 0 without calls."""
        return self.tokens / max(1, self.model_calls)

    def as_dict(self) -> dict[str, Any]:
        """Every number by its name, for JSON."""
        names = (
            "model_calls", "tokens", "seconds", "tokens_per_second", "tokens_per_call", "ahead_calls", "surplus_calls",
            "synthetic", "way",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | super().as_dict()

    def __add__(self, other: AcceptanceStats) -> GenerationStats:
        if not isinstance(other, GenerationStats):
            return NotImplemented
        return GenerationStats(
            *_summed(self, other),
            self.model_calls + other.model_calls,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.ahead_calls + other.ahead_calls,
            self.surplus_calls + other.surplus_calls,
            self.synthetic or other.synthetic,
            self.way if self.way == other.way else "several",
        )

    def __str__(self) -> str:
        text = (
            f"{self.tokens} tokens in {self.seconds:.2f} s ({self.tokens_per_second:.1f} tokens/s), "
            f"{self.model_calls} model calls ({self.tokens_per_call:.2f} tokens per call)"
        )
        if self.synthetic:
            text += ", SYNTHETIC acceptance"
        if not self.num_drafts:
            return text + ", nothing drafted"
        rates = ", ".join(f"{rate:.3f}" for rate in self.acceptance_rate_per_position)
        return (
            f"{text}\nMean acceptance length: {self.mean_acceptance_length:.2f}, Accepted: {self.num_accepted_tokens} tokens, "
            f"Drafted: {self.num_draft_tokens} tokens, Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {self.draft_acceptance_rate:.1%}"
        )


class AcceptanceCounts:
    """Counts on the host, of steps that the host has read anyway.

    Args:
        max_accepted: the most tokens that one step can accept.
    """

    def __init__(self, max_accepted: int) -> None:
        self._steps, self._drafted = [0] * (max_accepted + 1), 0

    def add(self, accepted: int, drafted: int) -> None:
        """Counts one step of one request. drafted: drafted tokens that the step verified; 0: not a draft."""
        if drafted > 0:
            self._steps[min(accepted, len(self._steps) - 1)] += 1
            self._drafted += drafted

    def snapshot(self) -> AcceptanceStats:
        """The counts."""
        return AcceptanceStats(tuple(self._steps), self._drafted)


class AcceptanceCounters:
    """Counts on the device. ``update`` is a few tensor operations on fixed buffers: no synchronisation, and a CUDA graph can
    hold it.

    Args:
        max_accepted: the most tokens that one step can accept.
        device: the device of the tensors that ``update`` takes.
    """

    def __init__(self, max_accepted: int, device: torch.device | str | None = None) -> None:
        if max_accepted < 0:
            raise ValueError(f"max_accepted must be 0 or more, got {max_accepted}")
        self._steps = torch.zeros(max_accepted + 1, dtype=torch.int64, device=device)
        self._drafted = torch.zeros((), dtype=torch.int64, device=device)
        self._numbers = torch.arange(max_accepted + 1, dtype=torch.int32, device=device)

    def update(self, num_accepted: Tensor, num_drafted: Tensor | int, active: Tensor | None = None) -> None:
        """Counts one step.

        Args:
            num_accepted: ``[B]`` int32, as ``AcceptResult.num_accepted``; clamped to ``max_accepted``.
            num_drafted: ``[B]``, or one number for all: drafted tokens that the step verified. 0: not a draft.
            active: ``[B]`` bool, False for requests that do not count, such as padded and finished ones; None: all count.
        """
        if isinstance(num_drafted, int):
            num_drafted = torch.full_like(num_accepted, num_drafted)
        if active is not None:
            num_drafted = num_drafted * active
        accepted = num_accepted.clamp(0, len(self._numbers) - 1).unsqueeze(1)
        self._steps.add_(((accepted == self._numbers) & (num_drafted > 0).unsqueeze(1)).sum(0))
        self._drafted.add_(num_drafted.sum())

    def reset(self) -> None:
        """Sets all counts to zero, in place."""
        self._steps.zero_()
        self._drafted.zero_()

    def snapshot(self) -> AcceptanceStats:
        """Reads the counts. Only this call synchronises with the device."""
        *steps, drafted = torch.cat([self._steps, self._drafted.unsqueeze(0)]).tolist()
        return AcceptanceStats(tuple(steps), drafted)


def _summed(left: AcceptanceStats, right: AcceptanceStats) -> tuple[tuple[int, ...], int]:
    counts = zip_longest(left.acceptance_histogram, right.acceptance_histogram, fillvalue=0)
    return tuple(a + b for a, b in counts), left.num_draft_tokens + right.num_draft_tokens

"""Measurements of a generation. Acceptance statistics, with the names and definitions of vLLM's speculative decoding metrics.

    mean acceptance length = 1 + accepted tokens / drafts        draft acceptance rate = accepted tokens / drafted tokens

A draft is a step of one request that verified at least one drafted token. Tokens accepted after a text's end (its limit, an
end token, a stopping criterion) are thrown away and not counted.

``profiled``: named ranges of a step for profilers, ``pass_ext::draft``, ``verify``, ``accept``, ``commit``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import accumulate, zip_longest
from typing import Any

import torch

_NOTHING = nullcontext()


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
        names = [each.name for each in fields(self)]
        for kind in type(self).__mro__:
            names += [name for name, value in vars(kind).items() if isinstance(value, property)]
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
    """True: coins of given rates accepted the drafts (``SyntheticAcceptance``): the texts are not the model's."""
    backend: str = ""
    """How the model computed calls of few rows: "fused", by pass_ext's ops alone, or "module", its own forward, and why."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests together per second; 0 where no time passed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_call(self) -> float:
        """Tokens of all requests together per call; 0 without calls."""
        return self.tokens / max(1, self.model_calls)

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
            self.backend if self.backend == other.backend else "several",
        )

    def __str__(self) -> str:
        text = (
            f"{self.tokens} tokens in {self.seconds:.2f} s ({self.tokens_per_second:.1f} tokens/s), "
            f"{self.model_calls} model calls ({self.tokens_per_call:.2f} tokens per call)"
        )
        if self.backend:
            text += f", {self.backend}"
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
    """Counts on the host, of steps that accept at most ``max_accepted`` tokens."""

    def __init__(self, max_accepted: int) -> None:
        self._steps, self._drafted = [0] * (max_accepted + 1), 0

    def add(self, accepted: int, drafted: int) -> None:
        """Counts one step of one request. drafted: tokens that the step verified; 0: not a draft."""
        if drafted > 0:
            self._steps[min(accepted, len(self._steps) - 1)] += 1
            self._drafted += drafted

    def snapshot(self) -> AcceptanceStats:
        """The counts."""
        return AcceptanceStats(tuple(self._steps), self._drafted)


def _summed(left: AcceptanceStats, right: AcceptanceStats) -> tuple[tuple[int, ...], int]:
    counts = zip_longest(left.acceptance_histogram, right.acceptance_histogram, fillvalue=0)
    return tuple(a + b for a, b in counts), left.num_draft_tokens + right.num_draft_tokens


def profiled(name: str) -> AbstractContextManager[object]:
    """The range ``pass_ext::<name>`` while a torch profiler is active or ``PASS_EXT_NVTX=1``, which adds an NVTX range on CUDA;
    otherwise nothing."""
    nvtx = os.environ.get("PASS_EXT_NVTX") == "1"
    if not nvtx and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    return _range(f"pass_ext::{name}", nvtx and torch.cuda.is_available())


@contextmanager
def _range(name: str, nvtx: bool) -> Iterator[None]:
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if nvtx else _NOTHING:
        yield

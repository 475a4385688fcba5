"""The interface of drafting: a ``Drafter`` proposes candidates, its ``DraftContext`` is the generation that it works for, and a
``DraftingMethod`` makes drafters.

    begin(session)   before the prompts are read
    propose(batch)   before each step that may draft: the candidates; before others it may be asked too, for none

A method from outside the package is an object with ``drafters(context)``; docs/guide/speculative.md has an example.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pass_ext.decoding.accept import DECODING_RULES
from pass_ext.decoding.drafting.candidates import Batch, Proposal, are_verified_by_logits, draw_children, drawing_mode
from pass_ext.decoding.drafting.device_rows import DeviceRows, HostDecides
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.taps import Tap
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.planning.step_times import StepTimes, measured_times, step_clock
from pass_ext.decoding.requests.guides import Guides
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.session import Session
from pass_ext.ops.common.rules import RULES
from pass_ext.ops.common.uploaded import uploaded

DRAFT_MODEL, LOOK_AHEAD, N_GRAM = "draft model", "look-ahead", "n-gram"
"""The origins of candidates, as messages name them."""


class Drafter(Protocol):
    """Proposes candidates for each step of a batch. A class that inherits from it sets ``max_depth`` and defines ``propose``;
    the rest has a default."""

    max_depth: int
    """The deepest candidate that it ever proposes."""
    name: str = "drafted"
    """The origin of its candidates, for messages."""
    rules: Collection[str] = tuple(RULES)
    """The accept rules that can verify its candidates."""
    pace: Pace | None = None
    """With ``context.pace(...)`` drafting pauses while it does not pay."""
    prompt_slots: int = 0
    """Look-ahead slots after the last token of a prompt."""
    deepest_row: int = 0
    """The deepest row below a root, look-ahead slots included, if that is deeper than ``max_depth``."""
    is_silent: bool = False
    """True: ``propose`` runs no code of the caller's, so the target's modules are the same after it."""
    taps: Sequence[Tap] = ()
    """Where ``batch.hidden`` is taken from the target: 0 to L - 1, the inputs of its layers; L, the output of the last one;
    "last", after the final norm."""

    def attached(self) -> AbstractContextManager[None]:
        """The context in which ``propose`` is called."""
        return nullcontext()

    def begin(self, session: Session) -> None:
        """Takes the target's session, before the prompts are read."""
        return

    def device_rows(self, *, is_synthetic: bool) -> DeviceRows:
        """The rows of steps that the device makes, if ``next_tree_`` drafts; raises ``HostDecides`` if ``propose`` has to.
        is_synthetic: coins accept, along one fixed path."""
        raise HostDecides(f"{self.name} candidates are drafted on the host")

    @abstractmethod
    def propose(self, batch: Batch) -> Proposal:
        """Candidates of at most ``batch.levels[b]`` levels for request b; None where that is 0."""
        ...


@dataclass(frozen=True)
class DraftContext:
    """The generation that a drafter works for."""

    target: Adapted
    texts: Sequence[list[int]]
    """The tokens of each request. They grow with every step."""
    sampling: BatchSampling
    rule: str
    """How candidates are verified."""
    graphs: bool = False
    """True: calls of the target with a repeated shape are CUDA graphs."""
    guides: Guides | None = None
    """The grammars of the texts; None: none has one."""

    @property
    def device(self) -> torch.device:
        """The target's device."""
        return self.target.table.device

    @property
    def is_sampled(self) -> bool:
        """False: all requests are greedy, and rules make no difference."""
        return not self.sampling.is_greedy

    @property
    def needs_draft_logits(self) -> bool:
        """True: the rule divides by the distribution that candidates were drawn from."""
        return are_verified_by_logits(self.sampling, self.rule)

    @property
    def target_adds(self) -> bool:
        """True: the target adds a token after the accepted ones, and greedy texts do not depend on the rule."""
        return DECODING_RULES[self.rule].target_adds

    @property
    def is_verified_by_rule(self) -> bool:
        """True: the text depends on the rule, which must be able to verify the candidates."""
        return self.is_sampled or not self.target_adds

    @property
    def chains_only(self) -> bool:
        """True: the rule takes one candidate below each node."""
        return self.is_sampled and DECODING_RULES[self.rule].chains_only

    def draw(
        self, logits: Tensor, width: int, requests: Sequence[int], depth: int = 1, parents: Sequence[int] = (0,)
    ) -> tuple[Tensor, Tensor]:
        """Draws children in the mode of the rule, with the sampling parameters of their requests.

        Args:
            logits: ``[n * P, V]``, of the P parents of n requests, request by request; on the target's device.
            width: children of each parent.
            requests: the n requests' numbers.
            depth: the children's depth.
            parents: the parents' node numbers.

        Returns:
            ``(tokens, logprobs)``, ``[n * P, width]``; -1 where a distribution has fewer tokens.
        """
        places = uploaded([len(self.texts[b]) - 1 for b in requests], self.device)
        sampling = self.sampling.of_requests(uploaded(requests, self.device))
        nodes = uploaded(parents, self.device)
        return draw_children(logits, width, drawing_mode(self.sampling, self.rule), sampling, places, depth, nodes)

    def pace(
        self, times: StepTimes | None = None, tokens: float = 1.0, seconds: float | None = None, drafts: object = None
    ) -> Pace:
        """The pace at which drafting pauses, for ``Drafter.pace``.

        Args:
            times: seconds of the target's calls by their rows; None: measured, once per model and machine.
            tokens: expected of a step, for each request.
            seconds: of that step; None: a plain one's.
            drafts: what drafts, such as a head: the times of steps with another one are not its own.
        """
        times = measured_times(self.target, graphs=self.graphs) if times is None else times
        clock = step_clock(times, 1 << max(map(len, self.texts)).bit_length(), id(drafts))
        return Pace(clock, tokens, times.at(len(self.texts)) if seconds is None else seconds)

    def check_origins(self, *origins: str) -> None:
        """Refuses a rule that cannot verify candidates of these origins in one tree."""
        if not self.target_adds and origins != (DRAFT_MODEL,):
            raise ValueError(
                f"generate: rule {self.rule!r} verifies the candidates of a draft model alone: method must be "
                f"MultiCandidate(...) without lookahead or ngram, got {' and '.join(origins) or 'no'} candidates"
            )
        if self.needs_draft_logits and len(origins) > 1:
            usual = [f"'{name}'" for name, rule in DECODING_RULES.items() if not rule.needs_draft_logits]
            raise ValueError(
                f"generate: rule must be {' or '.join(usual)} for {' and '.join(origins)} candidates together, got "
                f"{self.rule!r}: it verifies by the distribution that candidates were drawn from, and these have none in common"
            )


class DraftingMethod(Protocol):
    """A decoding method from outside the package, as ``generate`` takes it."""

    def drafters(self, context: DraftContext) -> Sequence[Drafter]:
        """New drafters for one generation. The candidates of the first that has any keep their node numbers; those of the
        others join its tree."""
        ...

"""``HostStep``: the host drafts, once it has read the step before. For every method, rule and logits processor.

draft     candidates for each request's tree
verify    one call of the model on all rows
accept    finds the longest right path of each tree, and the token that the target adds
commit    keys and values of the accepted rows go into the caches
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.drafting.longest_branch import longest_branch
from pass_ext.decoding.drafting.step import Batch
from pass_ext.decoding.drafting.step import Step as Rows
from pass_ext.decoding.loop.scores import Scores
from pass_ext.decoding.loop.step import Step
from pass_ext.decoding.loop.synthetic import Synthetic, spine_of
from pass_ext.decoding.loop.texts import Report, Texts
from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.requests.processors import processed
from pass_ext.decoding.requests.stateful_processors import Processor
from pass_ext.decoding.rules import DECODING_RULES, LONGEST_BRANCH
from pass_ext.decoding.session.reading import read_prompts
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.session.step_inputs import TreePacks
from pass_ext.ops.accept import AcceptResult, accept_tree
from pass_ext.tree import Tree

Steps = Sequence[Rows | None]


class _Done(NamedTuple):
    """A step that has run."""

    steps: Steps
    logits: Tensor
    """``[N, V]``, the model's, of the rows of ``steps``."""
    processed: Tensor
    """The same behind the logits processors."""
    result: AcceptResult | None
    """None: the prompts' call of a rule by which the target adds no token."""


class HostStep(Step):
    """The step of a batch.

    Args:
        context: model, sampling and rule.
        drafting: proposes the candidates.
        session: opened.
        processors: logits processors.
        scores: collects log probabilities and rows; None: nobody wants them.
        synthetic: accepts in place of the rule; None: the rule does.
    """

    def __init__(
        self,
        context: DraftContext,
        drafting: Drafting,
        session: Session,
        processors: Sequence[Processor],
        scores: Scores | None = None,
        synthetic: Synthetic | None = None,
    ) -> None:
        self._context, self._drafting, self._session = context, drafting, session
        self._scores, self._synthetic = scores, synthetic
        self._sampling, self._rule, self._processors = context.sampling, context.rule, processors
        # 1: the target adds a token behind the accepted ones
        self._target_adds = 0 if self._rule == LONGEST_BRANCH else 1
        self._packs = TreePacks(context.device)
        self._shards = context.target.logit_shards
        if self._shards is not None:
            self._shards.share(self._sampling.seeds)
        self._is_read = True

    @property
    def unread(self) -> int:
        """As ``Step``."""
        return 0 if self._is_read else 1

    def begin(self, texts: Texts, known: int) -> int:
        """As ``Step``."""
        self._texts = texts
        steps = [self._drafting.first(text) for text in texts.tokens]
        logits, calls = read_prompts(self._session, texts.tokens, known, self._drafting.prompt_slots)
        logits = self._usable(logits)
        if self._target_adds:
            self._accept(steps, logits)
        else:  # The first step reads each prompt's last token again, as the root of its tree.
            self._session.prefix_lens.sub_(1)
            self._done = _Done(steps, logits, logits, None)
            self._last_nodes = [0] * len(steps)
        return calls

    def __call__(self, *, drafts: bool) -> None:
        """As ``Step``."""
        with profiled("draft"):
            steps = self._drafting.propose(self._batch(drafts=drafts))
        with profiled("verify"):
            logits = self._verify(steps)
        result = self._accept(steps, logits)
        with profiled("commit"):
            self._session.commit(self._packs(_trees(steps)), result.path, result.num_accepted)

    def read(self) -> list[Report]:
        """As ``Step``."""
        steps, result = self._done.steps, self._done.result
        assert result is not None
        accepted, status = result.num_accepted.tolist(), result.status.tolist()
        emitted, path = result.emitted.tolist(), result.path.tolist()
        drafted = [sum(token != -1 for token in step.candidates.tokens) if step else 0 for step in steps]
        last = 1 - self._target_adds
        paths = zip(steps, path, accepted, strict=True)
        self._last_nodes = [nodes[count + last] if step else 0 for step, nodes, count in paths]
        self._is_read = True
        return list(map(Report, accepted, status, drafted, emitted))

    def follow(self, gained: Sequence[int]) -> None:
        """As ``Step``."""
        done = self._done
        if self._scores is not None and done.result is not None:
            self._scores.add(done.steps, done.logits, done.processed, done.result, gained)

    def _batch(self, *, drafts: bool) -> Batch:
        remaining = list(self._texts.remaining)
        levels = [max(left - self._target_adds, 0) if drafts else 0 for left in remaining]
        return Batch(self._texts.tokens, self._done.steps, self._done.logits, self._last_nodes, remaining, levels)

    def _verify(self, steps: Steps) -> Tensor:
        """``[N, V]``, the target's logits of all rows."""
        ids = [token for step in steps if step is not None for token in step.ids]
        self.rows = len(ids)
        logits = self._session.call(self._packs(_trees(steps)), self._on_device(ids), may_hold_slots=min(ids) < 0)
        return self._usable(logits)

    def _usable(self, logits: Tensor) -> Tensor:
        """The logits, with the columns of all ranks where something reads whole rows."""
        reads_rows = self._processors or self._rule == LONGEST_BRANCH or self._scores or self._synthetic
        if self._shards is not None and (reads_rows or self._context.guides is not None):
            return self._shards.whole(logits)
        return logits

    def _accept(self, steps: Steps, logits: Tensor) -> AcceptResult:
        law = logits
        if self._processors:
            texts = [text if step else None for text, step in zip(self._texts.tokens, steps, strict=True)]
            tokens = [step.candidates.tokens if step else [] for step in steps]
            law = processed(logits, self._processors, texts, _trees(steps), tokens)
        with profiled("accept"):
            if self._synthetic is not None:
                result = self._by_coins(self._synthetic, steps, law)
            elif self._rule == LONGEST_BRANCH:
                result = self._longest_branch(steps, law)
            else:
                result = self._by_rule(steps, law)
        self._done, self._is_read = _Done(steps, logits, law, result), False
        return result

    def _by_rule(self, steps: Steps, logits: Tensor) -> AcceptResult:
        trees = _trees(steps)
        tokens = [token for step in steps if step for token in step.accept_tokens]
        draft_rows = [row for step in steps if step for row in step.accept_draft_rows]
        guides = self._context.guides
        # A rule that divides by the drafts' distribution cannot judge look-ahead rows: they have none.
        if self._context.needs_draft_logits:
            nodes = [row for row, is_node in enumerate(_are_nodes(steps)) if is_node]
            trees = [step.candidates.tree if step else None for step in steps]
            tokens, draft_rows = [tokens[row] for row in nodes], [draft_rows[row] for row in nodes]
            logits = logits[: len(nodes)] if nodes[-1] == len(nodes) - 1 else logits[self._on_device(nodes)]
        draft_logits = self._drafting.draft_logits
        packed = self._packs(trees)
        accept = accept_tree if self._shards is None else self._shards.accept_tree
        return accept(
            logits,
            self._on_device(tokens),
            packed.parents,
            packed.cu_nodes,
            max(step.candidates.tree.max_depth for step in steps if step),
            rule=self._rule_for(draft_logits),
            draft_logits=draft_logits,
            draft_rows=None if draft_logits is None else self._on_device(draft_rows),
            allowed=None
            if guides is None
            else guides.of_nodes(
                trees,
                [step.accept_tokens if step else [] for step in steps],
                slots=not self._context.needs_draft_logits,
            ),
            draft_allowed=self._drafting.draft_allowed,
            positions=self._on_device([len(text) for text in self._texts.tokens]),
            **self._sampling.keywords(),
            **({} if self._scores is None else self._scores.options),
        )

    def _by_coins(self, synthetic: Synthetic, steps: Steps, logits: Tensor) -> AcceptResult:
        spines = [spine_of(step.candidates.tree) if step else [] for step in steps]
        width = max(map(len, spines))
        return synthetic.accept(
            logits,
            self._on_device([token for step in steps if step for token in step.accept_tokens]),
            self._on_device([[*spine, *[-1] * (width - len(spine))] for spine in spines]),
            self._packs(_trees(steps)).cu_nodes[:-1].long(),
            self._on_device([len(text) for text in self._texts.tokens]),
            self._sampling,
        )

    def _rule_for(self, draft_logits: Tensor | None) -> str:
        if self._sampling.is_greedy:  # all rules agree on greedy texts, and this rule takes any tree
            return "coupled"
        # Rules for independent draws need draft logits. A step without them has only fixed proposals: "rejection" judges those.
        return "rejection" if draft_logits is None and DECODING_RULES[self._rule].drafts == "with" else self._rule

    def _longest_branch(self, steps: Steps, logits: Tensor) -> AcceptResult:
        return longest_branch(
            logits,
            _trees(steps),
            [step.accept_tokens if step else [] for step in steps],
            self._drafting.draft_logits,
            [step.accept_draft_rows if step else [] for step in steps],
            self._sampling,
            [len(text) for text in self._texts.tokens],
        )

    def _on_device(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, device=self._session.device)


def _trees(steps: Steps) -> list[Tree | None]:
    return [step.tree if step else None for step in steps]


def _are_nodes(steps: Steps) -> list[bool]:
    return [slot < 0 for step in steps if step is not None for slot in step.tree.slots]

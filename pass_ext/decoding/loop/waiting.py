"""``WaitingLoop``: the host reads each step before it begins the next one. A step of all requests that have not ended:

    draft     candidates for each request's tree
    verify    one call of the model on all rows
    accept    finds the longest right path of each tree, and the token that the target adds
    commit    keys and values of the accepted rows go into the caches

The host reads the accepted tokens at one place of a step: it extends the texts, ends some, and shapes the next trees by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.drafting.longest_branch import longest_branch
from pass_ext.decoding.drafting.step import Batch, Step
from pass_ext.decoding.loop.base import Loop
from pass_ext.decoding.loop.scores import Scores
from pass_ext.decoding.loop.synthetic import Synthetic, spine_of
from pass_ext.decoding.loop.texts import Texts
from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.requests.processors import processed
from pass_ext.decoding.requests.stateful_processors import Processor
from pass_ext.decoding.rules import DECODING_RULES, LONGEST_BRANCH
from pass_ext.decoding.session.packs import TreePacks
from pass_ext.decoding.session.reading import read_prompts
from pass_ext.ops.accept import AcceptResult, accept_tree
from pass_ext.tree import Tree

Steps = Sequence[Step | None]


class WaitingLoop(Loop):
    """A loop for every method, rule and logits processor.

    Args:
        context, drafting, texts: as for ``Loop``.
        processors: logits processors.
        scores: collects log probabilities and rows; None: nobody wants them.
        synthetic: accepts in place of the rule; None: the rule does.
    """

    def __init__(
        self,
        context: DraftContext,
        drafting: Drafting,
        texts: Texts,
        processors: Sequence[Processor],
        scores: Scores | None = None,
        synthetic: Synthetic | None = None,
    ) -> None:
        super().__init__(context, drafting, texts)
        self._scores, self._synthetic = scores, synthetic
        self._sampling, self._rule, self._processors = context.sampling, context.rule, processors
        self._target_adds = (
            0 if self._rule == LONGEST_BRANCH else 1
        )  # 1: the target adds a token behind the accepted ones
        self._packs = TreePacks(context.device)
        self._shards = context.target.logit_shards
        if self._shards is not None:
            self._shards.share(self._sampling.seeds)

    def run_steps(self) -> None:
        """As ``Loop``."""
        batch = self._read_prompts()
        while any(batch.remaining):
            with profiled("draft"):
                steps = self._drafting.propose(batch)
            with profiled("verify"):
                logits = self._verify(steps)
            result = self._accept(steps, logits)
            with profiled("commit"):
                self.session.commit(self._packs(_trees(steps)), result.path, result.num_accepted)
            batch = self._extend(steps, logits, result)

    def _read_prompts(self) -> Batch:
        """Calls the model on the prompts, and adds the target's first token to each."""
        texts = self.texts.tokens
        steps = [self._drafting.first(text) for text in texts]
        logits, self.calls = read_prompts(self.session, texts, self._known, self._drafting.prompt_slots)
        logits = self._usable(logits)
        if self._target_adds:
            return self._extend(steps, logits, self._accept(steps, logits))
        # The first step reads each prompt's last token again, as the root of its tree.
        self.session.prefix_lens.sub_(1)
        return self._batch(steps, logits, [0] * len(steps))

    def _batch(self, steps: Steps, logits: Tensor, last_nodes: Sequence[int]) -> Batch:
        remaining = list(self.texts.remaining)
        levels = [max(left - self._target_adds, 0) for left in remaining]
        return Batch(self.texts.tokens, steps, logits, last_nodes, remaining, levels)

    def _verify(self, steps: Steps) -> Tensor:
        """``[N, V]``, the target's logits of all rows."""
        ids = [token for step in steps if step is not None for token in step.ids]
        self.calls += 1
        logits = self.session.call(self._packs(_trees(steps)), self._on_device(ids), may_hold_slots=min(ids) < 0)
        return self._usable(logits)

    def _usable(self, logits: Tensor) -> Tensor:
        """The logits, with the columns of all ranks where something reads whole rows."""
        reads_rows = self._processors or self._rule == LONGEST_BRANCH or self._scores or self._synthetic
        if self._shards is not None and (reads_rows or self._context.guides is not None):
            return self._shards.whole(logits)
        return logits

    def _accept(self, steps: Steps, logits: Tensor) -> AcceptResult:
        if self._processors:
            texts = [text if step else None for text, step in zip(self.texts.tokens, steps, strict=True)]
            tokens = [step.candidates.tokens if step else [] for step in steps]
            logits = processed(logits, self._processors, texts, _trees(steps), tokens)
        self._law = logits
        with profiled("accept"):
            if self._synthetic is not None:
                return self._by_coins(self._synthetic, steps, logits)
            if self._rule == LONGEST_BRANCH:
                return self._longest_branch(steps, logits)
            return self._by_rule(steps, logits)

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
            positions=self._on_device([len(text) for text in self.texts.tokens]),
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
            self._on_device([len(text) for text in self.texts.tokens]),
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
            [len(text) for text in self.texts.tokens],
        )

    def _extend(self, steps: Steps, logits: Tensor, result: AcceptResult) -> Batch:
        """Reads the result on the host, extends the texts, and ends those that are finished."""
        emitted, path, status = result.emitted.tolist(), result.path.tolist(), result.status.tolist()
        accepted = result.num_accepted.tolist()
        gained, last_nodes = [0] * len(steps), [0] * len(steps)
        for b, step in enumerate(steps):
            if step is None:
                continue
            tokens = step.candidates.tokens
            gained[b] = self.texts.extend(b, emitted[b], accepted[b], status[b], len(tokens) - tokens.count(-1))
            last_nodes[b] = path[b][accepted[b] + 1 - self._target_adds]
        if self._scores is not None:
            self._scores.add(steps, logits, self._law, result, gained)
        self._drafting.learn(steps, gained)
        return self._batch(steps, logits, last_nodes)

    def _on_device(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, device=self.session.device)


def _trees(steps: Steps) -> list[Tree | None]:
    return [step.tree if step else None for step in steps]


def _are_nodes(steps: Steps) -> list[bool]:
    return [slot < 0 for step in steps if step is not None for slot in step.tree.slots]

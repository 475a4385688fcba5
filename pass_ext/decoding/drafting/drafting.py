"""``Drafting``: merges the candidates of all drafters into one step per request, and pauses drafting that does not pay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from pass_ext.decoding.drafting.drafter import DraftContext, Drafter, DraftingMethod
from pass_ext.decoding.drafting.of_method import drafters_of
from pass_ext.decoding.drafting.rows.pace import Pauses
from pass_ext.decoding.drafting.step import Batch, Candidates, Proposal, Step, join
from pass_ext.decoding.methods import Method
from pass_ext.decoding.requests.grammar.guide import Guide
from pass_ext.decoding.requests.grammar.trees import allowed_nodes, forced_chains
from pass_ext.decoding.rules import LONGEST_BRANCH
from pass_ext.decoding.session.session import Session
from pass_ext.tree import MAX_TREE_NODES, Tree

_ROOT = Tree.chain(0)
_MOST_FORCED = 16  # tokens that a grammar forces, in one step of one request


class Drafting:
    """All drafters of one generation."""

    def __init__(self, method: Method | DraftingMethod, context: DraftContext) -> None:
        self.drafters = drafters_of(method, context)
        self.draft_logits: Tensor | None = None
        """``[R, V]``, the logits that the last candidates were drawn from."""
        self.draft_allowed: Tensor | None = None
        """The masks that they were drawn under."""
        self._needs_draft_logits = context.needs_draft_logits
        self.max_depth = max((drafter.max_depth for drafter in self.drafters), default=0)
        self._most_forced = _MOST_FORCED if context.guides is not None and getattr(method, "drafts", True) else 0
        self.max_depth += self._most_forced
        self.deepest_row = max((drafter.deepest_row for drafter in self.drafters), default=0)
        self.deepest_row = max(self.deepest_row, self.max_depth)
        self.prompt_slots = max((drafter.prompt_slots for drafter in self.drafters), default=0)
        times = next((drafter.step_times for drafter in self.drafters if drafter.step_times is not None), None)
        # Rule "longest_branch" cannot emit a token without candidates, so it never pauses.
        timed = None if context.rule == LONGEST_BRANCH else times
        kinds = {drafter.pauses for drafter in self.drafters}
        self.pauses = None if timed is None else Pauses(timed, context.texts, kinds)
        """When drafting pauses; None: never."""
        self._kinds: list[bool] = []
        """For each request whether drafters that pause together have candidates in the step."""
        self._context = context

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The context in which drafters propose."""
        with ExitStack() as stack:
            for drafter in self.drafters:
                stack.enter_context(drafter.attached())
            yield

    def begin(self, session: Session) -> None:
        """Gives all drafters the target's session."""
        for drafter in self.drafters:
            drafter.begin(session)

    def first(self, text: Sequence[int]) -> Step:
        """The step of a prompt: its last token, with look-ahead slots behind it."""
        return Step(text[-1], Candidates(_ROOT, groups=((0, self.prompt_slots),) if self.prompt_slots else ()))

    def propose(self, batch: Batch) -> list[Step | None]:
        """The next step of each request that still has to write; None for the others."""
        if self.pauses is not None:
            self.pauses.begin(batch.remaining)
        proposals = [drafter.propose(self._paused(batch, drafter.pauses)) for drafter in self.drafters]
        for drafter, proposal in zip(self.drafters, proposals, strict=True):
            _check(drafter, proposal, len(batch.texts))
        together = [p.candidates for drafter, p in zip(self.drafters, proposals, strict=True) if drafter.pauses]
        self._kinds = [any(candidates[b] is not None for candidates in together) for b in range(len(batch.texts))]
        # Where the rule needs draft logits, all candidates are of one drafter: check_origins.
        self.draft_logits = proposals[0].draft_logits if proposals and self._needs_draft_logits else None
        self.draft_allowed = proposals[0].draft_allowed if self.draft_logits is not None else None
        return [
            Step(text[-1], self._guided(b, merged(text[-1], [p.candidates[b] for p in proposals]), batch.levels[b]))
            if batch.remaining[b]
            else None
            for b, text in enumerate(batch.texts)
        ]

    def learn(self, steps: Sequence[Step | None], gained: Sequence[int]) -> None:
        """Tells the drafters and the pauses how many tokens each request's step gave."""
        for drafter in self.drafters:
            drafter.learn(gained)
        if self.pauses is not None and self.pauses.add(steps, gained, self._kinds):
            self._context.doubt_measured_times()

    def _guided(self, request: int, candidates: Candidates, levels: int) -> Candidates:
        guide = None if self._context.guides is None else self._context.guides.of(request)
        if guide is None:
            return candidates
        drawn = self.draft_logits is not None
        leaves_only = drawn or self._context.chains_only
        return guided(guide, candidates, levels, self._most_forced, drawn=drawn, leaves_only=leaves_only)

    def _paused(self, batch: Batch, kind: bool) -> Batch:
        """The batch as drafters of this kind see it: without levels where they pause."""
        return batch if self.pauses is None else replace(batch, levels=self.pauses.levels(batch.levels, kind))


def merged(root: int, parts: Iterable[Candidates | None]) -> Candidates:
    """Merges all candidates of a request into one tree. The first part with tokens keeps its node numbers, and so its groups
    and draft rows; the chains of the other parts join it."""
    present = [part for part in parts if part is not None]
    first = next((part for part in present if part.tokens), Candidates(_ROOT))
    chains = [chain for part in present if part is not first for chain in part.chains if chain]
    groups = next((part.groups for part in present if part.groups), ())
    seconds = sum(part.seconds for part in present)
    if not chains:
        return replace(first, groups=groups, seconds=seconds)
    parents, tokens = join(first.tree.parents, [root, *first.tokens], chains)
    return Candidates(Tree(parents), tokens[1:], first.draft_rows, groups, seconds)


def guided(
    guide: Guide, candidates: Candidates, levels: int, most_forced: int, *, drawn: bool, leaves_only: bool
) -> Candidates:
    """The candidates that a grammar allows, and the tokens that it forces behind the root and the leaves.

    A node's look-ahead slots move to the end of the chain behind it, where the next step begins if the chain is right.

    Args:
        levels: how deep candidates may be.
        most_forced: the most tokens of all chains.
        drawn: some candidates were drawn from a distribution that the rule divides by.
        leaves_only: no chain behind a root that has children: a node's children are all drawn, or the rule takes chains.
    """
    tree, tokens = candidates.tree, [-1, *candidates.tokens]
    rows = list(candidates.draft_rows or ()) if drawn else []
    rows += [-1] * (tree.num_nodes - len(rows))
    kept = allowed_nodes(guide, tree, tokens, [row < 0 for row in rows])
    number = {node: place for place, node in enumerate(kept)}
    parents = [number[tree.parents[node]] if node else -1 for node in kept]
    tokens, rows = [tokens[node] for node in kept], [rows[node] for node in kept]
    pruned = Tree(parents)
    ends = pruned.leaves if leaves_only else sorted({0, *pruned.leaves})
    groups = {number[node]: slots for node, slots in candidates.groups if node in number}
    most = min(most_forced, MAX_TREE_NODES - len(parents) - sum(groups.values()))
    for node, chain in forced_chains(guide, pruned, tokens, ends, levels, most).items():
        before = len(parents)
        if pruned.children(node):  # the root: the chain joins its children
            parents, tokens = join(parents, tokens, [chain])
        else:  # not by its tokens: draws with replacement may give two nodes the same path
            parents += [node, *range(before, before + len(chain) - 1)]
            tokens += chain
            rows[node] = -1
        rows += [-1] * (len(parents) - before)
        if before < len(parents) and node in groups:
            groups[len(parents) - 1] = groups.pop(node)
    return replace(
        candidates,
        tree=Tree(parents),
        tokens=tokens[1:],
        draft_rows=rows if drawn else None,
        groups=tuple(sorted(groups.items())),
    )


def _check(drafter: Drafter, proposal: Any, requests: int) -> None:
    """Refuses a proposal that does not fit the batch, or is so deep that its rows would be written past the caches' end."""
    if not isinstance(proposal, Proposal):
        raise TypeError(
            f"{type(drafter).__name__}.propose: result must be a pass_ext.drafting.Proposal, got {type(proposal).__name__}"
        )
    if len(proposal.candidates) != requests:
        raise ValueError(
            f"{type(drafter).__name__}.propose: candidates must be one or None for each of the {requests} requests, got "
            f"{len(proposal.candidates)}"
        )
    depth = max((part.tree.max_depth for part in proposal.candidates if part is not None), default=0)
    if depth > drafter.max_depth:
        raise ValueError(
            f"{type(drafter).__name__}.propose: candidates must be at most max_depth {drafter.max_depth} levels deep, "
            f"got {depth}"
        )

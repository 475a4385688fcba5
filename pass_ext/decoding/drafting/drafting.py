"""``Drafting``: the drafters of a method, whose candidates it merges into the rows of each request.

``drafters_of`` is the table of drafters by the method's class. Any other object may make its own: ``DraftingMethod``. A new
method of the package is a class in methods.py, a file here with its drafters, and a line in this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

from pass_ext.decoding.arguments import type_of
from pass_ext.decoding.drafting.candidates import Batch, Candidates, Proposal, join
from pass_ext.decoding.drafting.device_rows import DeviceRows, HostDecides
from pass_ext.decoding.drafting.drafter import DraftContext, Drafter, DraftingMethod
from pass_ext.decoding.drafting.from_draft_model import multi_candidate_drafters, speculative_drafters
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.from_slots import lookahead_drafters
from pass_ext.decoding.drafting.heads.assistant import assistant_drafters
from pass_ext.decoding.drafting.heads.block_drafter import dflash_drafters
from pass_ext.decoding.drafting.heads.head_drafter import head_drafters
from pass_ext.decoding.methods import (
    Assistant,
    DFlash,
    HeadMethod,
    Method,
    MultiCandidate,
    NGram,
    PaSS,
    Plain,
    Speculative,
)
from pass_ext.decoding.models.taps import Tap
from pass_ext.decoding.requests.grammar import Guide
from pass_ext.decoding.requests.guides import allowed_nodes, forced_chains
from pass_ext.decoding.session.session import Session
from pass_ext.tree import MAX_TREE_NODES, Tree

_ROOT = Tree.chain(0)
_NOTHING = Candidates(_ROOT)
_MOST_FORCED = 16  # tokens that a grammar forces, in one step of one request


class Drafting:
    """All drafters of one generation. Refuses a rule that cannot verify their candidates."""

    def __init__(self, method: Method | DraftingMethod, context: DraftContext) -> None:
        self.drafters = drafters_of(method, context)
        context.check_origins(*(drafter.name for drafter in self.drafters))
        for drafter in self.drafters:
            if context.is_verified_by_rule and context.rule not in drafter.rules:
                raise ValueError(
                    f"generate: rule must be {' or '.join(map(repr, drafter.rules))} for {drafter.name} candidates, got "
                    f"{context.rule!r}"
                )
        self._most_forced = _MOST_FORCED if context.guides is not None and getattr(method, "drafts", True) else 0
        self.max_depth = max((drafter.max_depth for drafter in self.drafters), default=0) + self._most_forced
        self.deepest_row = max([self.max_depth, *(drafter.deepest_row for drafter in self.drafters)])
        self.prompt_slots = max((drafter.prompt_slots for drafter in self.drafters), default=0)
        # Without candidates nobody would emit a token where the target adds none.
        paces = [drafter.pace for drafter in self.drafters if drafter.pace is not None]
        self.pace = paces[0] if paces and context.target_adds else None
        """When drafting pauses; None: never."""
        self.taps: list[Tap] = list(dict.fromkeys(place for drafter in self.drafters for place in drafter.taps))
        """Where the drafters read the target's hidden states."""
        self._context = context

    def begin(self, session: Session) -> None:
        """Gives all drafters the target's session."""
        for drafter in self.drafters:
            drafter.begin(session)

    def of_prompts(self, slots: int) -> Proposal:
        """No candidates, with so many look-ahead slots after the last token of each prompt."""
        none = Candidates(_ROOT, groups=((0, slots),) if slots else ())
        return Proposal([none] * len(self._context.texts))

    def device_rows(self, *, is_synthetic: bool) -> DeviceRows:
        """The rows of steps that the device makes; raises ``HostDecides`` where it cannot."""
        if len(self.drafters) > 1:
            raise HostDecides(f"candidates of {len(self.drafters)} drafters meet on the host")
        return self.drafters[0].device_rows(is_synthetic=is_synthetic) if self.drafters else DeviceRows(_ROOT)

    def _seen_by(self, drafter: Drafter, batch: Batch) -> Batch:
        """The batch with the hidden states at the drafter's own taps."""
        if list(drafter.taps) == self.taps:
            return batch
        columns = [self.taps.index(place) for place in drafter.taps]
        return replace(batch, hidden=[states[:, columns] for states in batch.hidden] if columns else ())

    def propose(self, batch: Batch) -> Proposal:
        """The candidates of each request that still has to write; None for the others."""
        proposals = [drafter.propose(self._seen_by(drafter, batch)) for drafter in self.drafters]
        for drafter, proposal in zip(self.drafters, proposals, strict=True):
            _check(drafter, proposal, len(batch.texts))
        # Where the rule needs draft logits, all candidates are of one drafter: check_origins.
        draft_logits = proposals[0].draft_logits if proposals and self._context.needs_draft_logits else None
        found: list[Candidates | None] = []
        for b, text in enumerate(batch.texts):
            if not batch.remaining[b]:
                found.append(None)
                continue
            candidates = merged(text[-1], [proposal.candidates[b] for proposal in proposals])
            guide = None if self._context.guides is None else self._context.guides.of(b)
            if guide is not None:
                drawn, levels = draft_logits is not None, batch.remaining[b] - 1
                leaves_only = drawn or self._context.chains_only
                candidates = guided(guide, candidates, levels, self._most_forced, drawn=drawn, leaves_only=leaves_only)
            found.append(candidates)
        return Proposal(found, draft_logits, None if draft_logits is None else proposals[0].draft_allowed)


def merged(root: int, parts: Iterable[Candidates | None]) -> Candidates:
    """Merges all candidates of a request into one tree. The first part with tokens keeps its node numbers, and so its groups
    and draft rows; the chains of the other parts join it."""
    present = [part for part in parts if part is not None]
    if not present:
        return _NOTHING
    first = next((part for part in present if part.tokens), _NOTHING)
    chains = [chain for part in present if part is not first for chain in part.chains if chain]
    groups = next((part.groups for part in present if part.groups), ())
    if not chains:
        return replace(first, groups=groups)
    parents, tokens = join(first.tree.parents, [root, *first.tokens], chains)
    return Candidates(Tree(parents), tokens[1:], first.draft_rows, groups)


def guided(
    guide: Guide, candidates: Candidates, levels: int, most_forced: int, *, drawn: bool, leaves_only: bool
) -> Candidates:
    """The candidates that a grammar allows, and the tokens that it forces after the root and the leaves.

    A node's look-ahead slots move to the end of the chain after it, where the next step begins if the chain is right.

    Args:
        levels: how deep candidates may be.
        most_forced: the most tokens of all chains.
        drawn: some candidates were drawn from a distribution that the rule divides by.
        leaves_only: no chain after a root that has children, because the rule verifies drawn children alone, or chains alone.
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


@singledispatch
def drafters_of(method: Any, context: DraftContext) -> Sequence[Drafter]:
    """The drafters of any method, for a method of your own that adds to them or looks at what they propose."""
    make = getattr(method, "drafters", None)
    if isinstance(method, type) or not callable(make):
        raise TypeError(
            "generate: method must be Plain(), NGram(...), PaSS(...), Speculative(...), MultiCandidate(...), what "
            "load_drafter(...) gives, or an object with drafters(context) (pass_ext.drafting.DraftingMethod), got "
            f"{type_of(method)}"
        )
    return make(context)


drafters_of.register(Plain, lambda method, context: [])
drafters_of.register(NGram, ngram_drafters)
drafters_of.register(PaSS, lookahead_drafters)
drafters_of.register(Speculative, speculative_drafters)
drafters_of.register(MultiCandidate, multi_candidate_drafters)
drafters_of.register(HeadMethod, head_drafters)
drafters_of.register(DFlash, dflash_drafters)
drafters_of.register(Assistant, assistant_drafters)

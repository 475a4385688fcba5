"""Candidates from a draft model, level by level: one draft call per level, for all requests together.

    level s: the draft reads the first s levels of each tree after its text (``Tree.slice`` cuts them from the largest tree);
    the children of level s are drawn from its logits; the decision selects the requests that draft on

Tokens stay on the device until the last level; a decision's scores are read at each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from pass_ext.decoding.accept import DECODING_RULES
from pass_ext.decoding.drafting.candidates import (
    Batch,
    Candidates,
    Proposal,
    draw_children,
    drawing_mode,
    levels_of,
)
from pass_ext.decoding.drafting.draft_calls import DraftCalls
from pass_ext.decoding.drafting.drafter import DRAFT_MODEL, LOOK_AHEAD, N_GRAM, DraftContext, Drafter
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.from_slots import lookahead_drafter
from pass_ext.decoding.methods import ByModel, MultiCandidate, Speculative
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.encoders import listening
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.vocabulary import check_pair
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.planning.plan import call_times, draft_plan
from pass_ext.decoding.session.session import Session
from pass_ext.modules.decision import DraftLevel
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.tree import Tree

Decision = Callable[[DraftLevel], Tensor]
_WITH_REPLACEMENT = tuple(name for name, rule in DECODING_RULES.items() if rule.drafts == "with")


class ModelDrafter(Drafter):
    """Fills a tree, numbered level by level, with the tokens of a draft model.

    Args:
        decision: see ``pass_ext.modules.decision``; None: all levels.
        pace: if the tree was planned from the times of calls.
    """

    name = DRAFT_MODEL
    rules = tuple(DECODING_RULES)

    def __init__(
        self,
        draft: Adapted,
        tree: Tree,
        context: DraftContext,
        decision: Decision | None = None,
        pace: Pace | None = None,
    ) -> None:
        check_pair(context.target, draft)
        self.max_depth = tree.max_depth
        self.pace = pace
        self.tree = tree
        self.levels_asked = 0
        """Levels drafted so far, over all requests."""
        self._context, self._texts, self._device = context, context.texts, context.device
        self._draft, self._sampling = draft, context.sampling
        self._decision = _on(decision, self._device)
        self._mode = drawing_mode(context.sampling, context.rule)
        self._levels = levels_of(tree, self._device)
        self._slices = [tree.slice(levels) for levels in range(tree.max_depth + 1)]
        self._needs_hidden = bool(getattr(decision, "needs_hidden", False))
        self._threshold = float(getattr(decision, "threshold", 0.5))

    def attached(self) -> AbstractContextManager[None]:
        return self._draft.attached()

    def begin(self, session: Session) -> None:
        """Allocates the draft's caches, or shares the target's."""
        options = dict(graphs=self._context.graphs, keep_hidden=self._needs_hidden)
        self._calls = DraftCalls(self._draft, session, self.tree.max_depth, self._texts, **options)

    def propose(self, batch: Batch) -> Proposal:
        if self._context.target_adds:
            return self.draft(batch.levels)
        width, positions = len(self.tree.children(0)), [len(text) for text in batch.texts]
        rule = DECODING_RULES[self._context.rule]
        return self.draft(batch.levels, rule.first_level(batch.last_logits(), width, self._sampling, positions))

    def draft(self, levels: Sequence[int], first: Tensor | None = None) -> Proposal:
        """Drafts candidates of at most ``levels[b]`` levels for request b; None where that is 0.

        first: ``[B, K]``, the first level's tokens if they are drawn already.
        """
        self._calls.keep_text()
        depths = [
            max(0, min(most, self.tree.max_depth, self._draft.most_positions - len(text)))
            for most, text in zip(levels, self._texts, strict=True)
        ]
        if not any(depths):
            return Proposal([None] * len(depths))
        nodes = self.tree.num_nodes
        tokens = torch.full((len(depths), nodes + 1), -1, device=self._device)
        draft_rows = [[-1] * nodes for _ in depths]
        drawn_from: list[Tensor] = []
        drawn_under: list[Tensor] = []
        drawn_rows = 0
        guides = self._context.guides
        places = uploaded([len(text) - 1 for text in self._texts], self._device)
        begin = 0
        if first is not None:
            tokens[:, self._levels[0].children[0]] = first
            begin = 1
        self._calls.read_text([b for b, depth in enumerate(depths) if depth > begin])
        for depth in range(begin, self.tree.max_depth):
            going = [b for b, most in enumerate(depths) if most > depth]
            if not going:
                break
            self.levels_asked += len(going)
            level = self._levels[depth]
            logits, hidden = self._calls.level(self._slices[depth], going, tokens, level.numbers)
            at = uploaded(going, self._device)
            sampling, width = self._sampling.of_requests(at), level.children.shape[1]
            allowed = None
            if guides is not None:  # the masks depend on the tokens so far, so the host waits for these
                allowed = guides.below(self.tree, going, tokens[at].tolist(), level.numbers)
            drawn, logprobs = draw_children(
                logits, width, self._mode, sampling, places[at], depth + 1, level.parents, allowed=allowed
            )
            places_of_children = at[:, None] * tokens.shape[1] + level.children.flatten()
            tokens.view(-1).index_copy_(0, places_of_children.flatten(), drawn.flatten())
            if self._context.needs_draft_logits:
                for b in going:
                    for parent in level.numbers:
                        draft_rows[b][parent], drawn_rows = drawn_rows, drawn_rows + 1
                drawn_from.append(logits.clone())  # the next call may overwrite them
                drawn_under += [] if allowed is None else [allowed]
            if self._decision is not None and depth + 1 < self.tree.max_depth:
                requests = at.repeat_interleave(len(level.parents))
                goes_on = self._scores(DraftLevel(logits, hidden, drawn, logprobs, requests, depth + 1))
                for b in set(going) - set(requests[goes_on].tolist()):
                    depths[b] = depth + 1
        drafted = tokens[:, :nodes].tolist()
        self._calls.set_tokens(drafted)
        candidates = [
            self._candidates(depth, drafted[b], draft_rows[b] if drawn_from else None) for b, depth in enumerate(depths)
        ]
        return Proposal(
            candidates,
            torch.cat(drawn_from) if drawn_from else None,
            torch.cat(drawn_under) if drawn_under else None,
        )

    def _candidates(self, levels: int, tokens: list[int], draft_rows: list[int] | None) -> Candidates | None:
        """The candidates in the first ``levels`` levels of the tree. tokens: of the nodes, the root's first."""
        if levels == 0:
            return None
        tree = self._slices[levels]
        if draft_rows is not None:
            inner = zip(draft_rows, tree.depths, strict=False)
            draft_rows = [row if depth < levels else -1 for row, depth in inner]
        return Candidates(tree, tokens[1 : tree.num_nodes], draft_rows)

    def _scores(self, level: DraftLevel) -> Tensor:
        assert self._decision is not None
        scores = self._decision(level)
        if not isinstance(scores, Tensor) or scores.shape != (len(level.requests),):
            came = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                f"decision must give a tensor of one score for each of the {len(level.requests)} rows, got {came}"
            )
        return (scores if scores.dtype == torch.bool else scores > self._threshold).to(self._device)


def speculative_drafters(method: Speculative, context: DraftContext) -> list[Drafter]:
    """The drafters of ``Speculative``: the draft model, if it is expected to gain anything, and n-grams."""
    context.check_origins(*([N_GRAM] if method.ngram else []), DRAFT_MODEL)
    if not context.target_adds or (context.is_sampled and context.rule in _WITH_REPLACEMENT):
        raise ValueError(
            f"Speculative: rule {context.rule!r} verifies several candidates of one parent: use MultiCandidate, got a chain"
        )
    drafter = model_drafter(method, context)
    return [*([] if drafter is None else [drafter]), *ngram_drafters(method.ngram, context)]


def multi_candidate_drafters(method: MultiCandidate, context: DraftContext) -> list[Drafter]:
    """The drafters of ``MultiCandidate``: look-ahead and the draft model, each if it is expected to gain anything, and n-grams.
    With a draft model only its times decide when to pause."""
    origins = {N_GRAM: method.ngram, LOOK_AHEAD: method.lookahead}
    context.check_origins(*(name for name, part in origins.items() if part is not None), DRAFT_MODEL)
    replaced = context.rule in _WITH_REPLACEMENT
    if context.is_verified_by_rule and method.replacement != replaced:
        rules = " or ".join(_WITH_REPLACEMENT)
        raise ValueError(
            f"MultiCandidate: rule {context.rule!r} and replacement={method.replacement} do not go together: candidates "
            f"must be drawn as they are verified; "
            f"use {f'rule {rules}' if method.replacement else 'MultiCandidate(replacement=True)'}"
        )
    drafter = model_drafter(method, context, method.decision)
    drafters: list[Drafter] = []
    if method.lookahead is not None:
        lookahead = lookahead_drafter(method.lookahead, context, is_alone=drafter is None)
        drafters += [] if lookahead is None else [lookahead]
    return [*drafters, *([] if drafter is None else [drafter]), *ngram_drafters(method.ngram, context)]


def model_drafter(
    method: Speculative | MultiCandidate, context: DraftContext, decision: Decision | None = None
) -> ModelDrafter | None:
    """The drafter of the method's tree, or of a planned one; None if no plan is expected to gain anything."""
    try:
        draft = packed_model(method.draft_model)
    except TypeError as error:
        raise TypeError(f"{type(method).__name__}: draft_model: {error}") from error
    draft = listening(draft, context.target)
    chosen = chosen_tree(method, context, draft)
    return None if chosen is None else ModelDrafter(draft, chosen[0], context, decision, chosen[1])


def chosen_tree(method: ByModel, context: DraftContext, draft: Adapted) -> tuple[Tree, Pace | None] | None:
    """The method's tree; or a planned one, and the pace at which it drafts. None if no plan is expected to gain anything."""
    tree, pace, name = method.tree, None, type(method).__name__
    if tree is None:
        options = dict(graphs=context.graphs, chain=context.chains_only)
        plan = draft_plan(method, context.target, draft, len(context.texts), **options)
        if plan.is_plain and context.target_adds:
            return None
        tree = Tree.chain(1) if plan.is_plain else plan.tree
        pace = context.pace(call_times(context.target, draft, graphs=context.graphs)[0], drafts=draft.model)
    if context.chains_only and len(tree.leaves) != 1:
        raise ValueError(
            f"{name}: branching must be that of a chain, (1, 1, ...), because rule {context.rule!r} takes chains, got a tree "
            f"with {len(tree.leaves)} branches; or use Speculative(...)"
        )
    return tree, pace


def _on(decision: Decision | None, device: torch.device) -> Decision | None:
    """The decision with its parameters on this device. A module is copied, so the caller's own stays where it is."""
    if isinstance(decision, nn.Module) and any(weight.device != device for weight in decision.parameters()):
        return copy.deepcopy(decision).to(device)
    return decision

"""``BlockDrafter``: candidates from one call of a block model.

a step    the features of the tokens that are new in the text go in front of a block, whose rows give the scores of all
          places at once; what is drawn at a place may depend on the draft in front of it
chain     drawn place by place as the rule asks
tree      with ``rows``: the best paths through the most probable tokens of each place, for rules that verify any proposals;
          with a cost of rows as many as are worth it
chance    of a token below another = softmax(scores of the place's offered tokens)  ·  their mass among all tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pass_ext.decoding.arguments import type_of
from pass_ext.decoding.drafting.candidates import Batch, Candidates, Proposal, draw_children, drawing_mode, filled
from pass_ext.decoding.drafting.drafter import N_GRAM, DraftContext, Drafter
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.heads.best_paths import best_paths
from pass_ext.decoding.drafting.heads.block_model import BlockModel
from pass_ext.decoding.drafting.heads.dflash import DFlashHead
from pass_ext.decoding.methods import DFlash
from pass_ext.decoding.models.vocabulary import in_vocabulary
from pass_ext.decoding.planning.constants import MOST_ROWS
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.session.session import Session
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.tree import PackedTrees, Tree

_MAX_PIECE = 512  # features of a text in each separate call
_LEAST_REACH = 0.1
"""A chain ends where the confidences say that it is reached less often."""
_LATTICE = 16  # tokens of each place of a lattice
_RACED = 0.8
"""The chance of a draft that was drawn with the target's own noise; what is left goes to the others by their probability."""


class BlockDrafter(Drafter):
    """Drafts with a head of the DFlash family.

    Args:
        length: drafts of a chain.
        rows: of a tree, the root's among them; "auto": as many as pay, at the pace's costs; None: chains.
        pace: None: drafting never pauses.
    """

    name = "DFlash"
    is_silent = True

    def __init__(
        self,
        head: DFlashHead,
        context: DraftContext,
        length: int,
        rows: int | Literal["auto"] | None,
        pace: Pace | None = None,
    ) -> None:
        self.max_depth, self.taps, self.pace = length, head.taps, pace
        self._costs: Sequence[float] | None = None
        """Tokens that a step of 1, 2, … rows costs each request; None: rows are free."""
        self._has_cost = rows == "auto"
        rows = MOST_ROWS if rows == "auto" else rows
        self._head, self._context, self._rows = head, context, rows
        self._block = length + head.first
        self._model = BlockModel(head.weights, context.target, self._block, head.first)
        self._mode = drawing_mode(context.sampling, context.rule)
        self._chain = Tree.chain(length)
        self._slices = [self._chain.slice(levels) for levels in range(length + 1)]
        self._numbers = torch.zeros(len(context.target.table), dtype=torch.int64, device=context.device)
        """The draft's number of each of the target's tokens."""
        if head.targets is not None:
            self._numbers[head.targets] = torch.arange(len(head.targets), device=context.device)
        self._pending: list[list[Tensor]] = [[] for _ in context.texts]
        """The target's states of each text that the network has not read; while drafting pauses they wait."""
        self._held = [0] * len(context.texts)

    def begin(self, session: Session) -> None:
        """Allocates the caches of the features."""
        self._session = Session(self._model, session.requests, session.capacity, cuda_graphs=self._context.graphs)

    def propose(self, batch: Batch) -> Proposal:
        for pending, states in zip(self._pending, batch.hidden, strict=True):
            if len(states):
                pending.append(states)
        depths = [min(levels, self.max_depth) for levels in batch.levels]
        going = [b for b, depth in enumerate(depths) if depth]
        if not going:
            return Proposal([None] * len(depths))
        if self._has_cost and self._rows is not None and self.pace is not None:
            active = sum(left > 0 for left in batch.remaining)
            self._costs = self.pace.costs(self._rows, max(1, active)) or self._costs
        logits = self._call(going)
        tokens, scores, masks = self._drawn(logits, going, max(depths), batch)
        chains = tokens.tolist()
        ends = self._ends(tokens, [depths[b] for b in going])
        found: list[Candidates | None] = [None] * len(depths)
        if self._rows is not None:
            warm = self._context.sampling.temperature
            warm = None if warm is None else warm[uploaded(going, warm.device), None, None, None]
            for b, candidates in zip(going, self._trees(logits, tokens, ends, warm), strict=True):
                found[b] = candidates
            return Proposal(found)
        for i, (b, chain, end) in enumerate(zip(going, chains, ends, strict=True)):
            rows = [*range(i * max(depths), i * max(depths) + end), -1]
            found[b] = Candidates(self._slices[end], chain[1 : end + 1], None if scores is None else rows)
        return Proposal(found, scores, masks)

    # ---- the call ----

    def _call(self, going: Sequence[int]) -> Tensor:
        """Calls the network on the new features of these requests and a block each -> logits ``[n, length, Vd]``."""
        given = [[] if b not in going else self._pending[b] for b in range(len(self._held))]
        counts = [sum(map(len, pieces)) for pieces in given]
        features = self._model.features(torch.cat([states for pieces in given for states in pieces])).split(counts)
        unread = [new if b in going else None for b, new in enumerate(features)]
        while any(new is not None and len(new) > _MAX_PIECE for new in unread):
            pieces = [None if new is None or len(new) <= _MAX_PIECE else new[:_MAX_PIECE] for new in unread]
            self._read(pieces, has_blocks=False)
            unread = [
                new if new is None or piece is None else new[_MAX_PIECE:]
                for new, piece in zip(unread, pieces, strict=True)
            ]
        for b in going:
            self._pending[b] = []
        return self._read(unread, has_blocks=True).unflatten(0, (len(going), -1))

    def _read(self, features: Sequence[Tensor | None], *, has_blocks: bool) -> Tensor:
        """Calls the network on these features of each request, with a block after them or not, and keeps the features."""
        counts = [0 if new is None else len(new) for new in features]
        block = self._block if has_blocks else 0
        in_call = [b for b, new in enumerate(features) if new is not None]
        ids: list[int] = []
        for b in in_call:
            ids += [0] * counts[b]
            if has_blocks:
                ids += [self._context.texts[b][-1], *[-1] * (block - 1)]
        packed = self._session.packed([None if new is None else Tree.chain(len(new) + block - 1) for new in features])
        given = torch.cat([new for new in features if new is not None])
        self._model.prepare(given, [counts[b] for b in in_call], has_blocks=has_blocks)
        wanted = None if has_blocks else packed.cu_nodes[:0]  # a piece of a prompt is no shape that comes again
        logits = self._session.call(packed, uploaded(ids, self._session.device), wanted)
        self._keep(packed, counts)
        return logits

    def _keep(self, packed: PackedTrees, counts: Sequence[int]) -> None:
        """Commits the rows of the features."""
        paths, device = [list(range(count)) for count in counts], self._session.device
        accepted = uploaded([max(count - 1, 0) for count in counts], device).int()
        self._session.store(packed, uploaded(filled(paths), device).int(), accepted)
        self._held = [held + count for held, count in zip(self._held, counts, strict=True)]
        self._session.prefix_lens.copy_(uploaded(self._held, device))

    # ---- the chain ----

    def _drawn(
        self, logits: Tensor, going: Sequence[int], depth: int, batch: Batch
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tokens ``[n, 1 + depth]``, the roots' first. For rules that need them: the scores ``[n * depth, V]`` that they were
        drawn from, and the masks."""
        context, device = self._context, self._context.device
        places = uploaded([len(batch.texts[b]) - 1 for b in going], device)
        sampling = context.sampling.of_requests(uploaded(going, device))
        tokens = uploaded([[batch.texts[b][-1]] for b in going], device)
        levels = torch.arange(depth, device=device)
        if self._head.transition is None and context.guides is None:  # nothing depends on the draft in front
            all_scores = self._whole(logits[:, :depth].flatten(0, 1))
            drawn, _ = draw_children(all_scores, 1, self._mode, sampling, places, levels + 1, levels)
            tokens = torch.cat((tokens, drawn.view(len(going), depth)), 1)
            return tokens, all_scores if context.needs_draft_logits else None, None
        scores: list[Tensor] = []
        masks: list[Tensor] = []
        for level in range(depth):
            scores.append(self._scores(logits[:, level], level, tokens[:, -1]))
            allowed = None
            if context.guides is not None:  # the masks depend on the tokens so far, so the host waits for these
                allowed = context.guides.below(self._slices[level + 1], going, tokens.tolist(), [level])
                masks.append(allowed)
            parents = levels[level : level + 1]
            drawn, _ = draw_children(scores[-1], 1, self._mode, sampling, places, level + 1, parents, allowed=allowed)
            tokens = torch.cat((tokens, drawn), 1)
        if not context.needs_draft_logits:
            return tokens, None, None
        return tokens, *(torch.stack(each, 1).flatten(0, 1) if each else None for each in (scores, masks))  # type: ignore[return-value]

    def _scores(self, logits: Tensor, level: int, before: Tensor) -> Tensor:
        """``[n, V]`` of one place, below these tokens ``[n]``."""
        transition = self._head.transition
        return self._whole(
            logits if transition is None else transition.scores(logits, self._model.hidden[:, level], before)
        )

    def _whole(self, logits: Tensor) -> Tensor:
        """``[R, Vd]`` of the draft's tokens as ``[R, V]`` of the target's."""
        targets, target = self._head.targets, self._context.target.table
        if targets is not None:
            logits = logits.new_full((len(logits), len(target)), -torch.inf).index_copy_(1, targets, logits)
        return in_vocabulary(logits, len(target), target.device)

    def _ends(self, tokens: Tensor, depths: Sequence[int]) -> list[int]:
        """How deep each chain is: it ends in front of a draft that is hardly ever reached. Its confidence says so before it is
        drawn, so the rules stay exact."""
        head = self._head
        if head.confidence is None or head.transition is None:
            return list(depths)
        reach, reached = torch.ones(len(tokens), device=tokens.device), []
        for level in range(tokens.shape[1] - 1):
            hidden = self._model.hidden[:, level]
            reach = reach * head.confidence.of(hidden, head.transition.latent(tokens[:, level], hidden))
            reached.append(reach)
        worth = (torch.stack(reached, 1) >= _LEAST_REACH).sum(1).clamp(min=1).tolist()
        return list(map(min, depths, worth))

    # ---- the tree ----

    def _trees(self, logits: Tensor, tokens: Tensor, depths: Sequence[int], warm: Tensor | None) -> list[Candidates]:
        """The best paths of each request through the most probable tokens of each place, among which are those of its chain.

        tokens: ``[n, 1 + depth]``, the chains, their roots first.
        warm: ``[n, 1, 1, 1]``, the temperatures; None: all are greedy.
        """
        assert self._rows is not None
        head, chain = self._head, tokens[:, 1:]
        logits = logits[:, : chain.shape[1]].float()
        chain = chain.clamp(min=0)[..., None]
        if head.targets is not None:
            chain = self._numbers[chain]
        # The chain's own comes first: drawn by the target's noise it may be far from the most probable ones.
        offered = _LATTICE if head.transition is None or head.transition.offers is None else head.transition.offers
        best = logits.scatter(2, chain, torch.inf).topk(min(offered, logits.shape[2]), -1).indices
        scores = logits.gather(2, best)[:, :, None]
        names = best if head.targets is None else head.targets[best]
        if head.transition is not None:
            roots = tokens[:, :1, None].expand(-1, 1, best.shape[2])
            before = torch.cat((roots, names[:, :-1]), 1)
            hidden = self._model.hidden[:, : chain.shape[1], None].expand(-1, -1, best.shape[2], -1)
            scores = scores + head.transition.among(best[:, :, None], head.transition.latent(before, hidden))
        scores = scores.expand(-1, -1, best.shape[2], -1)
        if warm is not None:
            heat = warm.where(warm > 0, 1.0)
            scores, logits = scores / heat, logits / heat[..., 0]
        chances = scores.softmax(-1)
        if head.transition is None or head.transition.offers is None:  # all tokens have scores, some are offered
            mass = logits.gather(2, best).logsumexp(2) - logits.logsumexp(2)
            chances = chances * mass.exp()[..., None, None]
        if warm is not None and self._mode == "coupled":
            raced = chances[:, :, 0] * (1 - _RACED) / (1 - chances[:, :, 0, :1]).clamp(min=1e-6)
            raced[:, :, 0] = _RACED
            chances[:, :, 0] = raced.where(warm[:, 0] > 0, chances[:, :, 0])
        requests = zip(names.tolist(), chances.tolist(), depths, strict=True)
        most, costs = self._rows - 1, self._costs
        trees = (best_paths(own[:depth], chance[:depth], most, costs) for own, chance, depth in requests)
        return [Candidates(Tree(parents), found[1:]) for parents, found in trees]


def dflash_drafters(method: DFlash, context: DraftContext) -> list[Drafter]:
    """The drafters of ``DFlash``: the head's, and n-grams."""
    head = method.head
    if not isinstance(head, DFlashHead):
        raise TypeError(
            f"DFlash: head must be one that load_drafter(path, model) has read for DFlash, got {type_of(head)}"
        )
    length = method.length if isinstance(method.length, int) else head.length
    if length > head.length:
        raise ValueError(
            f"DFlash: length must be at most {head.length}, what a block of this head drafts, got {length}"
        )
    context.check_origins(*([N_GRAM] if method.ngram else []), BlockDrafter.name)
    if method.rows is not None and (context.needs_draft_logits or context.chains_only):
        raise ValueError(
            f"DFlash: rows must be None, a chain, for rule {context.rule!r}, which divides by the distribution that candidates "
            f"were drawn from, or takes chains alone, got {method.rows!r}"
        )
    pace = context.pace(drafts=head) if "auto" in (method.length, method.rows) else None
    return [BlockDrafter(head, context, length, method.rows, pace), *ngram_drafters(method.ngram, context)]

"""``HostStep``: the host drafts, once it has read the step before. For every method, rule and logits processor.

draft     candidates for each request's tree
verify    one call of the model on all rows
accept    finds the longest right path of each tree, and the token that the target adds
commit    keys and values of the accepted rows go into the caches
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction, VerifiedRows
from pass_ext.decoding.drafting.candidates import Batch, Candidates, Proposal
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.loop.loop import Step
from pass_ext.decoding.loop.scores import Scores
from pass_ext.decoding.loop.texts import Report, Texts
from pass_ext.decoding.requests.processors import Processor, processed
from pass_ext.decoding.session.reading import read_prompts
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.stats import profiled
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.common.uploaded import uploaded


class _Rows(NamedTuple):
    """The rows of a step. One upload has all its numbers: each costs the host as much as an op."""

    proposal: Proposal
    ids: Tensor
    """``[N]``, as ``lookahead_embed`` takes them."""
    tokens: Tensor
    """``[M]``, of the rows that are verified."""
    draft_rows: Tensor
    lengths: Tensor
    """``[B]``, of the texts."""


class _Done(NamedTuple):
    """A step that has run."""

    candidates: Sequence[Candidates | None]
    logits: Tensor
    """``[N, V]``, the model's, of the rows of ``candidates``."""
    processed: Tensor
    """The same after the logits processors."""
    result: AcceptResult | None
    """None: the prompts' call of a rule by which the target adds no token."""


class HostStep(Step):
    """The step of a batch. scores: collects log probabilities and supports; None: nobody wants them."""

    def __init__(
        self,
        context: DraftContext,
        drafting: Drafting,
        session: Session,
        accept: AcceptFunction,
        processors: Sequence[Processor],
        scores: Scores | None,
    ) -> None:
        self._context, self._drafting, self._session, self._scores = context, drafting, session, scores
        self._sampling, self._function, self._processors = context.sampling, accept, processors
        self._shards = context.target.logit_shards
        if self._shards is not None:
            self._shards.share(self._sampling.seeds)
        self._is_read = True

    @property
    def unread(self) -> int:
        return 0 if self._is_read else 1

    def begin(self, texts: Texts, known: Sequence[int]) -> int:
        self._texts = texts
        are_silent = all(drafter.is_silent for drafter in self._drafting.drafters)
        self._session.is_undisturbed = texts.are_silent and are_silent and not self._processors
        logits, slots, calls = read_prompts(self._session, texts.tokens, known, self._drafting.prompt_slots)
        rows, logits = self._rows_of(self._drafting.of_prompts(slots)), self._usable(logits)
        if self._function.target_adds:
            self._accept(rows, logits)
        elif self._session.states:
            raise ValueError(
                f"rule {self._context.rule!r} reads each prompt's last token again, which the layers of "
                f"{self._session.model.name} that keep a state cannot: use another rule"
            )
        else:  # The first step reads each prompt's last token again, as the root of its tree.
            self._session.prefix_lens.sub_(1)
            if self._session.text_states is not None:
                self._session.text_states.drop_last()
            self._done = _Done(rows.proposal.candidates, logits, logits, None)
            self._last_nodes = [0] * len(texts)
        return calls

    def resume(self, logits: Tensor) -> None:
        """Goes on after steps of the roots alone that another step has run. logits ``[B, V]``: of the last one."""
        roots = self._drafting.of_prompts(0).candidates
        self._done, self._last_nodes = _Done(roots, logits, logits, None), [0] * len(roots)

    def __call__(self, *, drafts: bool) -> None:
        with profiled("draft"):
            rows = self._rows_of(self._drafting.propose(self._batch(drafts=drafts)))
        trees = self._session.packed([part.rows if part else None for part in rows.proposal.candidates])
        self.rows = len(rows.ids)
        with profiled("verify"):
            logits = self._usable(self._session.call(trees, rows.ids))
        result = self._accept(rows, logits)
        with profiled("commit"):
            self._session.commit(trees, result.path, result.num_accepted)

    def read(self) -> list[Report]:
        candidates, result = self._done.candidates, self._done.result
        assert result is not None
        accepted, status = result.num_accepted.tolist(), result.status.tolist()
        emitted, path = result.emitted.tolist(), result.path.tolist()
        drafted = [sum(token != -1 for token in part.tokens) if part else 0 for part in candidates]
        last = 0 if self._function.target_adds else 1
        paths = zip(candidates, path, accepted, strict=True)
        self._last_nodes = [nodes[count + last] if part else 0 for part, nodes, count in paths]
        self._is_read = True
        return list(map(Report, accepted, status, drafted, emitted))

    def follow(self, gained: Sequence[int]) -> None:
        done = self._done
        if self._scores is not None and done.result is not None:
            self._scores.add(done.candidates, done.logits, done.processed, done.result, gained)

    def _batch(self, *, drafts: bool) -> Batch:
        remaining = list(self._texts.remaining)
        added = 1 if self._function.target_adds else 0
        levels = [max(left - added, 0) if drafts else 0 for left in remaining]
        states = self._session.text_states
        hidden = () if states is None else states.take()
        return Batch(
            self._texts.tokens, self._done.candidates, self._done.logits, self._last_nodes, remaining, levels, hidden
        )

    def _rows_of(self, proposal: Proposal) -> _Rows:
        ids: list[int] = []
        tokens: list[int] = []
        draft_rows: list[int] = []
        for text, part in zip(self._texts.tokens, proposal.candidates, strict=True):
            if part is None:
                continue
            slots = part.rows.slots[part.tree.num_nodes :]
            ids += [text[-1], *(max(token, 0) for token in part.tokens), *(-1 - slot for slot in slots)]
            verified = [text[-1], *part.tokens]
            # A rule that divides by the drafts' distribution cannot verify look-ahead rows: they have none.
            verified += [] if self._context.needs_draft_logits else [-1] * len(slots)
            drawn = part.draft_rows or ()
            tokens += verified
            draft_rows += [*drawn, *[-1] * (len(verified) - len(drawn))]
        numbers = ids, tokens, draft_rows, list(map(len, self._texts.tokens))
        return _Rows(proposal, *uploaded([*chain(*numbers)], self._session.device).split(list(map(len, numbers))))

    def _usable(self, logits: Tensor) -> Tensor:
        """The logits, with the columns of all ranks where something reads whole rows."""
        scores = self._scores is not None and self._scores.reads_rows
        reads_rows = self._processors or scores or self._context.guides is not None or not self._function.by_ops
        return self._shards.whole(logits) if self._shards is not None and reads_rows else logits

    def _accept(self, rows: _Rows, logits: Tensor) -> AcceptResult:
        drawn_from, candidates = logits, rows.proposal.candidates
        if self._processors:
            texts = [text if part else None for text, part in zip(self._texts.tokens, candidates, strict=True)]
            tokens = [part.tokens if part else [] for part in candidates]
            trees = [part.rows if part else None for part in candidates]
            drawn_from = processed(logits, self._processors, texts, trees, tokens)
        with profiled("accept"):
            result = self._verified(rows, drawn_from)
        self._done, self._is_read = _Done(candidates, logits, drawn_from, result), False
        return result

    def _verified(self, rows: _Rows, logits: Tensor) -> AcceptResult:
        proposal, guides = rows.proposal, self._context.guides
        candidates, draft_logits = proposal.candidates, proposal.draft_logits
        trees = [part.rows if part else None for part in candidates]
        if self._context.needs_draft_logits:
            nodes = [row for row, slot in enumerate(slot for tree in trees if tree for slot in tree.slots) if slot < 0]
            trees = [part.tree if part else None for part in candidates]
            is_front = nodes[-1] == len(nodes) - 1
            logits = logits[: len(nodes)] if is_front else logits[uploaded(nodes, logits.device)]
        options: dict[str, Any] = {} if self._scores is None else dict(self._scores.options)
        if guides is not None:
            each = zip(self._texts.tokens, candidates, strict=True)
            verified = [[text[-1], *part.tokens] if part else [] for text, part in each]
            options["allowed"] = guides.of_nodes(trees, verified, slots=not self._context.needs_draft_logits)
            options["draft_allowed"] = proposal.draft_allowed
        verified_rows = VerifiedRows(
            logits,
            rows.tokens,
            self._session.packed(trees),
            max(part.tree.max_depth for part in candidates if part),
            rows.lengths,
            self._sampling,
            draft_logits,
            None if draft_logits is None else rows.draft_rows.int(),
            self._shards,
            options,
        )
        return self._function.accept(verified_rows)

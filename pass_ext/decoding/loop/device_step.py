"""``DeviceStep``: verify, accept, commit and the draft of the next step as one function over fixed buffers, which the device
runs without the host.

    logits   = model(ids, positions)          of R rows per request
    result   = accept_tree(logits, tokens)    and its keys and values go into the caches
    offered  = draft_sample(look-ahead rows of the logits)
    next     = next_rows_(result, offered)    ids, tokens, positions, lengths for the next step; a report for the host

fixed_step.py: one tree for all requests and steps. chosen_step.py: rows that are chosen at each place, by ``next_tree_``.
With CUDA graphs the third step is recorded, and this and all later ones replay it. Where the host has read the step before,
each call has the rows that it needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal
from warnings import warn

import torch
from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction, JudgedRows
from pass_ext.decoding.loop.loop import Step
from pass_ext.decoding.loop.texts import Report, Reports, Texts
from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.reading import read_prompts
from pass_ext.decoding.session.recording import record_graph
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.session.step_inputs import uploaded
from pass_ext.ops.accept import AcceptResult
from pass_ext.tree import PackedTrees, Tree, pack_trees

_EAGER_STEPS = 2  # before the one that is recorded: kernels load, libraries allocate
Records = Literal["always", "if possible", "never"]


class DeviceStep(Step):
    """The step of a batch, and the buffers that it works on.

    Args:
        session: opened.
        rows: of each request.
        candidates: the deepest tree that the steps judge.
        prompt_slots: look-ahead slots behind the last token of a prompt.
        report_numbers: in front of the emitted tokens of the report.
        sampling: of the batch.
        accept: judges drafts as rule "coupled" does, from nothing but the device's tensors.
        records: whether steps become a CUDA graph. "if possible": a model that no graph can hold goes on without one, with a
            warning.
        recalls: the steps read the texts, to which each adds its tokens.
    """

    def __init__(
        self,
        session: Session,
        rows: int,
        candidates: Tree,
        prompt_slots: int,
        report_numbers: int,
        sampling: BatchSampling,
        accept: AcceptFunction,
        records: Records,
        *,
        recalls: bool,
    ) -> None:
        device, requests = session.device, session.requests
        self._session, self._depth, self._report_numbers = session, candidates.max_depth, report_numbers
        self._prompt_slots = prompt_slots
        self._function = accept
        self._rows = torch.zeros(3, requests, rows, dtype=torch.int64, device=device)
        # The same memory, [B, R] each, and all requests' rows one behind the other.
        self._row_ids, self._row_tokens, self._row_positions = self._rows.unbind()
        self._ids, self._tokens, self._positions = (rows.flatten() for rows in self._rows)
        self._lengths = torch.zeros(requests, dtype=torch.int64, device=device)
        self._limits = torch.zeros(requests, dtype=torch.int64, device=device)
        # Not zeros: memory behind the texts is never touched.
        self._text = torch.empty(requests, session.room, dtype=torch.int64, device=device) if recalls else None
        self.report = torch.zeros(requests, report_numbers + self._depth + 1, dtype=torch.int64, device=device)
        """``[B, numbers + A]``, as ``next_rows_`` or ``next_tree_`` writes it; the next step overwrites it."""
        self._sampling = BatchSampling(**{name: _copy(value) for name, value in sampling.keywords().items()})
        self._parameters = self._sampling.keywords()
        self._root_trees: dict[int, tuple[Tensor, PackedTrees]] = {}
        self._records: str = records
        self._eager_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def renew(self, sampling: BatchSampling, lag: int) -> None:
        """Begins another generation. lag: steps that the host may be behind; 0: each call has the rows that it needs."""
        for name, value in self._parameters.items():
            if value is not None:
                value.copy_(sampling.keywords()[name])
        self._reports, self._lag = Reports(self.report, lag + 1), lag

    @property
    def unread(self) -> int:
        return len(self._reports)

    def begin(self, texts: Texts, known: int) -> int:
        self._texts, session = texts, self._session
        self._rows.zero_()
        self._row_tokens.fill_(-1)
        self._lengths.copy_(uploaded([len(text) for text in texts.tokens], session.device), non_blocking=True)
        if self._text is not None:
            longest = max(map(len, texts.tokens))
            padded = uploaded([[*text, *[0] * (longest - len(text))] for text in texts.tokens], session.device)
            self._text[:, :longest].copy_(padded, non_blocking=True)
        self._end_at(texts.limits)
        session.is_undisturbed = texts.are_silent
        logits, calls = read_prompts(session, texts.tokens, known, self._prompt_slots)
        self._accept_prompts(logits)
        self._reports.send()
        return calls

    @abstractmethod
    def _accept_prompts(self, logits: Tensor) -> None:
        """The first step. logits: ``[B * (1 + slots), V]``, of the prompts' last tokens and the slots behind them."""

    def __call__(self, *, drafts: bool) -> None:
        if not self._lag:
            self._run_needed(drafts)
        elif self._graph is not None:
            self._graph.replay()
        elif self._records == "never" or self._eager_steps < _EAGER_STEPS:
            self._eager_steps += 1
            self._run()
        else:
            self._record()
        self._reports.send()

    def read(self) -> list[Report]:
        self._read_rows = rows = self._reports.read()
        return [Report(row[0], row[1], row[2], row[self._report_numbers :]) for row in rows]

    def follow(self, gained: Sequence[int]) -> None:
        """Ends the texts that have ended on the host, from the next step on."""
        left = self._texts.remaining
        if any(left) and any(count and not rest for count, rest in zip(gained, left, strict=True)):
            self._end_at([limit if rest else 0 for limit, rest in zip(self._texts.limits, left, strict=True)])

    def _end_at(self, limits: Sequence[int]) -> None:
        """Ends texts at these lengths, from the next step on; 0: now."""
        self._limits.copy_(uploaded(limits, self._session.device), non_blocking=True)

    @abstractmethod
    def _run_needed(self, drafts: bool) -> None:
        """Runs a step of the rows that it needs. The host has read the step before. drafts: False: the roots alone."""

    @abstractmethod
    def _run(self) -> None:
        """Runs a step of all rows."""

    def _record(self) -> None:
        """Records a step as a graph and runs it."""
        try:
            graph, _ = record_graph(self._run, self._session.device)
        except RuntimeError as error:
            if self._records != "if possible":
                raise
            warn(
                "generate: this model's steps cannot be a CUDA graph, so the host launches each kernel: "
                + str(error).partition("\n")[0],
                stacklevel=2,
            )
            self._records = "never"
            self._run()
            return
        graph.replay()
        self._graph = graph

    def _roots(self, slots: int) -> tuple[Tensor, PackedTrees]:
        """The tokens, none of them a candidate, and the trees of roots with so many slots."""
        if slots not in self._root_trees:
            tree = Tree.chain(0).with_lookahead({0: slots}) if slots else Tree.chain(0)
            requests, device = self._session.requests, self._session.device
            none = torch.full((requests * (1 + slots),), -1, dtype=torch.int64, device=device)
            self._root_trees[slots] = none, pack_trees([tree] * requests, device)
        return self._root_trees[slots]

    def _judged(
        self, trees: PackedTrees, ids: Tensor, tokens: Tensor, positions: Tensor, depth: int
    ) -> tuple[Tensor, AcceptResult]:
        """Calls the model on rows, accepts among them, and commits the accepted ones -> their logits, and the result."""
        self.rows = len(ids)
        with profiled("verify"):
            logits = self._session.call_at(trees, ids, positions)
        result = self._accept(logits, tokens, trees, depth)
        with profiled("commit"):
            self._session.store(trees, result.path, result.num_accepted)
        return logits, result

    def _accept(self, logits: Tensor, tokens: Tensor, trees: PackedTrees, depth: int) -> AcceptResult:
        with profiled("accept"):
            rows = JudgedRows(logits, tokens, trees, depth, self._lengths, self._sampling)
            return self._function.accept(rows)


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()

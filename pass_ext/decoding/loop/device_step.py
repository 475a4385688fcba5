"""``DeviceStep``: verify, accept, commit and the draft of the next step as one function over fixed buffers, which the device
runs without the host.

    logits   = model(ids, positions)          of R rows per request
    result   = accept_tree(logits, tokens)    and its keys and values go into the caches
    offered  = draft_sample(look-ahead rows of the logits)
    next     = next_rows_(result, offered)    ids, tokens, positions, lengths for the next step; a report for the host

``FixedStep``: one tree for all requests and steps. ``ChosenStep``: rows that ``next_tree_`` chooses at each place in the text.
With CUDA graphs the third step is recorded, and this and all later ones replay it. Where the host has read the step before,
each call has the rows that it needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction, JudgedRows
from pass_ext.decoding.drafting.candidates import filled
from pass_ext.decoding.drafting.from_slots import ChosenRows, FixedRows
from pass_ext.decoding.loop.loop import Step
from pass_ext.decoding.loop.texts import Report, Reports, Texts
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.reading import read_prompts
from pass_ext.decoding.session.recording import record_graph
from pass_ext.decoding.session.session import Session, uploaded
from pass_ext.decoding.stats import profiled
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.next import REPORT_NUMBERS, TREE_REPORT_NUMBERS, next_rows_, next_tree_
from pass_ext.ops.tree import tree_prepare
from pass_ext.tree import PackedTrees, Tree, pack_trees

_EAGER_STEPS = 2  # before the one that is recorded: kernels load, libraries allocate
_USED, _NODES = 3, 4  # places in the report of chosen rows
Records = Literal["always", "if possible", "never"]


class DeviceStep(Step):
    """The step of a batch, and the buffers that it works on.

    Args:
        session: begun, with its room.
        plan: of the rows.
        rows: of each request.
        depth: of the deepest tree that the steps judge.
        report_numbers: in front of the emitted tokens of the report.
        sampling: of the batch.
        accept: judges drafts as rule "coupled" does, from nothing but the device's tensors.
        records: whether steps become a CUDA graph. "if possible": a model that no graph can hold goes on without one, with a
            warning.
    """

    def __init__(
        self,
        session: Session,
        plan: FixedRows | ChosenRows,
        rows: int,
        depth: int,
        report_numbers: int,
        sampling: BatchSampling,
        accept: AcceptFunction,
        records: Records,
    ) -> None:
        device, requests = session.device, session.requests
        self._session, self._depth, self._report_numbers = session, depth, report_numbers
        self._prompt_slots, self._offers = plan.prompt_slots, plan.offers
        self._function = accept
        self._rows = torch.zeros(3, requests, rows, dtype=torch.int64, device=device)
        # The same memory, [B, R] each, and all requests' rows one after the other.
        self._row_ids, self._row_tokens, self._row_positions = self._rows.unbind()
        self._ids, self._tokens, self._positions = (rows.flatten() for rows in self._rows)
        self._lengths = torch.zeros(requests, dtype=torch.int64, device=device)
        self._limits = torch.zeros_like(self._lengths)
        recalls = plan.offers is not None and plan.offers.recalls
        # Not zeros: memory after the texts is never touched.
        self._text = torch.empty(requests, session.room, dtype=torch.int64, device=device) if recalls else None
        self.report = torch.zeros(requests, report_numbers + depth + 1, dtype=torch.int64, device=device)
        """``[B, numbers + A]``, as ``next_rows_`` or ``next_tree_`` writes it; the next step overwrites it."""
        own = {name: value if value is None else value.clone() for name, value in sampling.keywords().items()}
        self._sampling = BatchSampling(**own)
        self._parameters = self._sampling.keywords()
        self._root_trees: dict[int, tuple[Tensor, PackedTrees]] = {}
        self._records: str = records
        self._eager_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def renew(self, sampling: BatchSampling, lag: int) -> None:
        """Begins another generation. lag: steps that the host may be late; 0: each call has the rows that it needs."""
        for name, value in self._parameters.items():
            if value is not None:
                value.copy_(getattr(sampling, name))
        self._reports, self._lag = Reports(self.report, lag + 1), lag

    @property
    def unread(self) -> int:
        return len(self._reports)

    def begin(self, texts: Texts, known: Sequence[int]) -> int:
        self._texts, session = texts, self._session
        self._rows.zero_()
        self._row_tokens.fill_(-1)
        self._lengths.copy_(uploaded([len(text) for text in texts.tokens], session.device), non_blocking=True)
        if self._text is not None:
            tokens = uploaded(filled(texts.tokens), session.device)
            self._text[:, : tokens.shape[1]].copy_(tokens, non_blocking=True)
        self._end_at(texts.limits)
        session.is_undisturbed = texts.are_silent
        logits, calls = read_prompts(session, texts.tokens, known, self._prompt_slots)
        self._accept_prompts(logits)
        self._reports.send()
        return calls

    @abstractmethod
    def _accept_prompts(self, logits: Tensor) -> None:
        """The first step. logits: ``[B * (1 + slots), V]``, of the prompts' last tokens and the slots after them."""

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
            self._graph, _ = record_graph(self._run, self._session.device)
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
        else:
            self._graph.replay()

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
            return self._function.accept(JudgedRows(logits, tokens, trees, depth, self._lengths, self._sampling))


class FixedStep(DeviceStep):
    """The step of one tree.

    Look-ahead rows of all groups are drafted from, not only those after the accepted node: so no row has to be found first. A
    step of the roots alone may stand between, where there are no candidates.
    """

    def __init__(
        self, session: Session, plan: FixedRows, sampling: BatchSampling, accept: AcceptFunction, records: Records
    ) -> None:
        tree, nodes = plan.tree, plan.candidates.num_nodes
        super().__init__(session, plan, len(tree), plan.candidates.max_depth, REPORT_NUMBERS, sampling, accept, records)
        self._nodes = nodes
        self._trees = pack_trees([tree] * session.requests, session.device)
        self._parents = self._trees.parents[: len(tree)].clone()
        self._slot_ids = self._lengths.new_tensor([-1 - slot for slot in tree.slots[nodes:]])
        groups = [tree.group_rows(node) for node in range(nodes)]
        self._groups = self._parents.new_tensor([rows[0] - nodes if len(rows) else -1 for rows in groups])

    def _accept_prompts(self, logits: Tensor) -> None:
        self._row_ids[:, self._nodes :] = self._slot_ids
        slots = self._prompt_slots
        self._advance_roots(self._accept(logits, *self._roots(slots), 0), logits, slots)

    def _run_needed(self, drafts: bool) -> None:
        drafts = drafts and max(self._texts.remaining) > 1  # the target adds the last token itself
        is_root_alone = len(self._parents) == 1
        if is_root_alone or (drafts and bool((self._row_tokens[:, 1 : self._nodes] >= 0).any())):
            self._run()
        else:
            self._run_roots(self._prompt_slots if drafts else 0)

    def _run_roots(self, slots: int) -> None:
        """A step of the roots without candidates, with so many look-ahead slots after each: those of a prompt, or 0."""
        session = self._session
        self._row_tokens[:, 1 : self._nodes] = -1  # they are not judged
        tokens, trees = self._roots(slots)
        ahead = torch.arange(1 + slots, device=session.device)
        ids = torch.cat([self._row_ids[:, :1], (-ahead[1:]).expand(session.requests, -1)], dim=1)
        positions = (self._lengths[:, None] - 1 + ahead).flatten()
        logits, result = self._judged(trees, ids.flatten(), tokens, positions, 0)
        self._advance_roots(result, logits, slots)

    def _advance_roots(self, result: AcceptResult, logits: Tensor, slots: int) -> None:
        places = self._lengths[:, None] + torch.arange(slots, device=logits.device)
        after = logits.view(self._session.requests, 1 + slots, -1)[:, 1:]
        self._advance(result, after, places, self._parents.new_zeros(1))

    def _run(self) -> None:
        logits, result = self._judged(self._trees, self._ids, self._tokens, self._positions, self._depth)
        slots = logits.view(self._session.requests, -1, logits.shape[-1])[:, self._nodes :]
        self._advance(result, slots, self._row_positions[:, self._nodes :], self._groups)

    def _advance(self, result: AcceptResult, slots: Tensor, places: Tensor, groups: Tensor) -> None:
        """Moves the rows past the accepted tokens.

        Args:
            slots: ``[B, S, V]``, logits of the look-ahead rows.
            places: ``[B, S]``, their text positions.
            groups: the first look-ahead row of each node's group, or -1.
        """
        offers, requests = self._offers, self._session.requests
        offered: dict[str, Any] = {}
        with profiled("draft"):
            if offers is not None and slots.shape[1]:
                draws = offers.draws(self._sampling)
                foreseen = (places + 1).flatten() if draws else None
                sampling = self._sampling.repeated(slots.shape[1]) if draws else self._sampling
                offered = offers.of_rows(slots.flatten(0, 1), foreseen, sampling, requests, None)
                offered |= {"groups": groups} | self._parameters
            next_rows_(
                self._rows,
                self._lengths,
                self._session.prefix_lens,
                self.report,
                limits=self._limits,
                parents=self._parents,
                nodes=self._nodes,
                text=self._text,
                **result._asdict(),
                **offered,
            )


class ChosenStep(DeviceStep):
    """The step of chosen rows. All requests have R rows, of which some may not be in use, so that shapes never change; where
    the host has read the step before, the model is called on those in use."""

    def __init__(
        self, session: Session, plan: ChosenRows, sampling: BatchSampling, accept: AcceptFunction, records: Records
    ) -> None:
        device, requests, rows, slots = session.device, session.requests, plan.choice.rows, plan.prompt_slots
        super().__init__(session, plan, rows, slots, TREE_REPORT_NUMBERS, sampling, accept, records)
        self._plan = plan
        unused = [0] * (rows - 1 - slots)
        self._first_parents = torch.tensor([-1, *range(slots), *unused], dtype=torch.int32, device=device)
        self._first_ids = torch.tensor([0, *(-1 - slot for slot in range(slots)), *unused], device=device)
        self._parents = self._first_parents.repeat(requests, 1)
        self._flat_parents = self._parents.flatten()
        self._rates = torch.tensor(plan.choice.rates, device=device)
        self._price = torch.zeros(rows, device=device) if plan.choice.has_price else None
        self._bounds = torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=device)
        self._offered = torch.zeros(requests * rows, plan.offers.most, dtype=torch.int64, device=device)
        self._scores = torch.zeros(requests * rows, plan.offers.most, device=device)

    def _accept_prompts(self, logits: Tensor) -> None:
        self._row_ids.copy_(self._first_ids.expand_as(self._row_ids))
        self._parents.copy_(self._first_parents.expand_as(self._parents))
        self._advance(self._accept(logits, *self._roots(self._prompt_slots), 0), logits, 1)

    def price_by(self, pace: Pace, requests: int) -> None:
        if self._price is not None and (prices := pace.prices(len(self._price), requests)) is not None:
            self._price.copy_(torch.tensor(prices))

    def _run_needed(self, drafts: bool) -> None:
        most, left = self._rows.shape[2], self._texts.remaining
        used = [row[_USED] if rest else 0 for row, rest in zip(self._read_rows, left, strict=True)]
        nodes = [row[_NODES] for row in self._read_rows]
        if not drafts and any(count > 1 for count in used):
            self._row_tokens[:, 1:] = -1  # they are not judged
            used, nodes = [min(count, 1) for count in used], [1] * len(used)
        depth = self._depth if max(nodes) > 1 else 0
        bounds = self._bounds.new_tensor([0, *accumulate(used)])
        picked = [b * most + row for b, count in enumerate(used) for row in range(count)]
        # Of one text they are the first ones, which need no copy.
        rows = slice(used[0]) if len(used) == 1 else torch.tensor(picked, device=self._session.device)
        trees = self._packed(self._flat_parents[rows], bounds, max(used))
        logits, result = self._judged(trees, self._ids[rows], self._tokens[rows], self._positions[rows], depth)
        if isinstance(rows, slice):
            self._advance(result, logits, nodes[0])
        else:
            self._advance_some(result, logits if sum(used) > len(used) else logits[:0], rows)

    def _run(self) -> None:
        trees = self._packed(self._flat_parents, self._bounds, self._rows.shape[2])
        logits, result = self._judged(trees, self._ids, self._tokens, self._positions, self._depth)
        self._advance(result, logits, 0)

    def _packed(self, parents: Tensor, bounds: Tensor, rows: int) -> PackedTrees:
        return PackedTrees(parents, bounds, rows, *tree_prepare(parents, bounds, rows))

    def _advance_some(self, result: AcceptResult, logits: Tensor, rows: Tensor) -> None:
        """As ``_advance``, with the logits of these rows [N] of all requests'."""
        offered = {}
        with profiled("draft"):
            if len(logits):
                offered = self._plan.offers.top_of_rows(logits, 1)
                self._offered[rows], self._scores[rows] = offered["offered"][0], offered["scores"][0]
                shape = self._session.requests, -1, self._offered.shape[1]
                offered |= {"offered": self._offered.view(shape), "scores": self._scores.view(shape)}
            self._next(result, offered)

    def _advance(self, result: AcceptResult, logits: Tensor, first: int) -> None:
        """Moves the rows past the accepted tokens. logits: of the rows as they are. first: the first row of each request that
        may be a look-ahead slot's."""
        requests, offered = self._session.requests, {}
        if requests > 1:
            first = 0  # all rows are drafted from: those in front are not copied away
        with profiled("draft"):
            if len(logits) > first * requests:
                offered = self._plan.offers.top_of_rows(logits[first:], requests) | {"first": first}
            self._next(result, offered)

    def _next(self, result: AcceptResult, offered: dict[str, Any]) -> None:
        next_tree_(
            self._rows,
            self._parents,
            self._lengths,
            self._session.prefix_lens,
            self.report,
            limits=self._limits,
            rates=self._rates,
            price=self._price,
            text=self._text,
            **result._asdict(),
            **offered,
            **self._parameters,
        )

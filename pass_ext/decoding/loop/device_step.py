"""``DeviceStep``: verify, accept, commit and the draft of the next step as one function over fixed buffers, which the device
runs without the host.

    logits   = model(ids, positions)          of R rows per request
    result   = accept_tree(logits, tokens)    and its keys and values go into the caches
    offered  = draft_sample(look-ahead rows of the logits)
    next     = next_tree_(result, offered)    ids, tokens, positions, lengths for the next step; a report for the host

All requests have R rows: one tree in all steps, or rows that ``next_tree_`` chooses at each place in the text, some of which
may not be in use. So shapes never change: with CUDA graphs the third step is recorded, and this and all later ones replay it.
Where the host has read the step before, each call has the rows that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction, VerifiedRows
from pass_ext.decoding.drafting.candidates import filled
from pass_ext.decoding.drafting.device_rows import DeviceRows
from pass_ext.decoding.loop.loop import Step
from pass_ext.decoding.loop.texts import Report, Reports, Texts
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.reading import read_prompts
from pass_ext.decoding.session.recording import record_graph
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.stats import profiled
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.ops.next import REPORT_NUMBERS, next_tree_
from pass_ext.ops.tree import tree_prepare
from pass_ext.tree import PackedTrees, Tree, pack_trees

_EAGER_STEPS = 2  # before the one that is recorded: kernels load, libraries allocate
_USED, _NODES = 3, 4  # places in the report
Records = Literal["always", "if possible", "never"]


class DeviceStep(Step):
    """The step of a batch, and the buffers that it works on.

    Args:
        session: begun, with its capacity.
        plan: of the rows.
        sampling: of the batch.
        accept: verifies drafts as rule "coupled" does, from nothing but the device's tensors.
        records: whether steps become a CUDA graph. "if possible": a model that no graph can hold goes on without one, with a
            warning.
    """

    def __init__(
        self,
        session: Session,
        plan: DeviceRows,
        sampling: BatchSampling,
        accept: AcceptFunction,
        records: Records,
    ) -> None:
        device, requests, rows, tree, choice = session.device, session.requests, plan.count, plan.tree, plan.choice
        self._session, self._plan, self._function = session, plan, accept
        self._rows = torch.zeros(3, requests, rows, dtype=torch.int64, device=device)
        # The same memory, [B, R] each, and all requests' rows one after the other.
        self._row_ids, self._row_tokens, self._row_positions = self._rows.unbind()
        self._ids, self._tokens, self._positions = (rows.flatten() for rows in self._rows)
        unused = [0] * (rows - len(tree))
        slots = [-1 - slot for slot in tree.slots[tree.num_nodes :]]
        self._first_ids = uploaded([*[0] * tree.num_nodes, *slots, *unused], device)
        self._first_parents = uploaded([*tree.parents, *unused], device, torch.int32)
        self._parents = self._first_parents.repeat(requests, 1)
        self._flat_parents = self._parents.flatten()
        self._rates = None if choice is None else uploaded(choice.rates, device, torch.float32)
        self._costs = torch.zeros(rows, device=device) if choice is not None and choice.has_cost else None
        self._bounds = torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=device)
        self._kept = pack_trees([tree] * requests, device) if choice is None else None
        self._front = tree.num_nodes if choice is None else 0  # rows in front of the slots
        self._lengths = torch.zeros(requests, dtype=torch.int64, device=device)
        self._limits = torch.zeros_like(self._lengths)
        recalls = plan.offers is not None and plan.offers.recalls
        # Not zeros: memory after the texts is never touched.
        self._text = torch.empty(requests, session.capacity, dtype=torch.int64, device=device) if recalls else None
        self.report = torch.zeros(requests, REPORT_NUMBERS + plan.depth + 1, dtype=torch.int64, device=device)
        """``[B, numbers + A]``, as ``next_tree_`` writes it; the next step overwrites it."""
        self.logits: Tensor
        """``[N, V]``, of the rows of the last call."""
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
        session = self._session
        self._take(texts)
        if self._text is not None:
            tokens = uploaded(filled(texts.tokens), session.device)
            self._text[:, : tokens.shape[1]].copy_(tokens, non_blocking=True)
        session.is_undisturbed = texts.are_silent
        logits, slots, calls = read_prompts(session, texts.tokens, known, self._plan.prompt_slots)
        self._row_ids.copy_(self._first_ids.expand_as(self._row_ids))
        self._parents.copy_(self._first_parents.expand_as(self._parents))
        self._advance_roots(self._accept(logits, *self._roots(slots), 0), logits, slots)
        self._reports.send()
        return calls

    def resume(self, texts: Texts) -> None:
        """Goes on with texts that another step has written so far. Of steps of one row."""
        self._take(texts)
        self._row_ids.copy_(uploaded([text[-1:] for text in texts.tokens], self._session.device), non_blocking=True)
        torch.sub(self._lengths[:, None], 1, out=self._row_positions)

    def _take(self, texts: Texts) -> None:
        """Takes the texts, with empty rows."""
        self._texts = texts
        self._rows.zero_()
        self._row_tokens.fill_(-1)
        lengths = [len(text) for text in texts.tokens]
        self._lengths.copy_(uploaded(lengths, self._session.device), non_blocking=True)
        self._end_at_limits()

    def price_by(self, pace: Pace, requests: int) -> None:
        if self._costs is not None and (costs := pace.costs(len(self._costs), requests)) is not None:
            self._costs.copy_(uploaded(costs, self._costs.device, torch.float32))

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
        return [Report(row[0], row[1], row[2], row[REPORT_NUMBERS:]) for row in rows]

    def follow(self, gained: Sequence[int]) -> None:
        """Ends the texts that have ended on the host, from the next step on."""
        left = self._texts.remaining
        if any(left) and any(count and not rest for count, rest in zip(gained, left, strict=True)):
            self._end_at_limits()

    def _end_at_limits(self) -> None:
        """Ends texts at their limits, those that have ended on the host now, from the next step on."""
        limits = [limit if rest else 0 for limit, rest in zip(self._texts.limits, self._texts.remaining, strict=True)]
        self._limits.copy_(uploaded(limits, self._session.device), non_blocking=True)

    def _run_needed(self, drafts: bool) -> None:
        """Runs a step of the rows that it needs. The host has read the step before. drafts: False: the roots alone."""
        if self._kept is None:
            self._run_used(drafts)
            return
        drafts = drafts and max(self._texts.remaining) > 1  # the target adds the last token itself
        if self._plan.count == 1 or (drafts and any(row[_NODES] > 1 for row in self._read_rows)):
            self._run()
        else:
            self._run_roots(self._plan.prompt_slots if drafts else 0)

    def _run(self) -> None:
        """Runs a step of all rows."""
        trees = self._kept or self._packed(self._flat_parents, self._bounds, self._plan.count)
        logits, result = self._verified(trees, self._ids, self._tokens, self._positions, self._plan.depth)
        self._advance(result, logits, 0, self._front)

    def _run_roots(self, slots: int) -> None:
        """A step of the roots without candidates, with so many look-ahead slots after each: those of a prompt, or 0."""
        session = self._session
        self._row_tokens[:, 1:] = -1  # they are not verified
        tokens, trees = self._roots(slots)
        ahead = torch.arange(1 + slots, device=session.device)
        ids = torch.cat([self._row_ids[:, :1], (-ahead[1:]).expand(session.requests, -1)], dim=1)
        positions = (self._lengths[:, None] - 1 + ahead).flatten()
        logits, result = self._verified(trees, ids.flatten(), tokens, positions, 0)
        self._advance_roots(result, logits, slots)

    def _run_used(self, drafts: bool) -> None:
        """A step of the chosen rows that are in use."""
        most, left = self._plan.count, self._texts.remaining
        used = [row[_USED] if rest else 0 for row, rest in zip(self._read_rows, left, strict=True)]
        nodes = [row[_NODES] for row in self._read_rows]
        if not drafts and any(count > 1 for count in used):
            self._row_tokens[:, 1:] = -1  # they are not verified
            used, nodes = [min(count, 1) for count in used], [1] * len(used)
        depth = self._plan.depth if max(nodes) > 1 else 0
        bounds = self._bounds.new_tensor([0, *accumulate(used)])
        picked = [b * most + row for b, count in enumerate(used) for row in range(count)]
        # Of one text they are the first ones, which need no copy.
        rows = slice(used[0]) if len(used) == 1 else uploaded(picked, self._session.device)
        trees = self._packed(self._flat_parents[rows], bounds, max(used))
        logits, result = self._verified(trees, self._ids[rows], self._tokens[rows], self._positions[rows], depth)
        if isinstance(rows, slice):
            self._advance(result, logits, 0, nodes[0])
        else:
            self._advance_some(result, logits if sum(used) > len(used) else logits[:0], rows)

    def _packed(self, parents: Tensor, bounds: Tensor, rows: int) -> PackedTrees:
        return PackedTrees(parents, bounds, rows, *tree_prepare(parents, bounds, rows))

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

    def _verified(
        self, trees: PackedTrees, ids: Tensor, tokens: Tensor, positions: Tensor, depth: int
    ) -> tuple[Tensor, AcceptResult]:
        """Calls the model on rows, accepts among them, and commits the accepted ones -> their logits, and the result."""
        self.rows = len(ids)
        with profiled("verify"):
            self.logits = logits = self._session.call_at(trees, ids, positions)
        result = self._accept(logits, tokens, trees, depth)
        with profiled("commit"):
            self._session.store(trees, result.path, result.num_accepted)
        return logits, result

    def _accept(self, logits: Tensor, tokens: Tensor, trees: PackedTrees, depth: int) -> AcceptResult:
        with profiled("accept"):
            return self._function.accept(VerifiedRows(logits, tokens, trees, depth, self._lengths, self._sampling))

    def _advance_roots(self, result: AcceptResult, logits: Tensor, slots: int) -> None:
        """As ``_advance``, after a step of the roots with so many slots, which in the rows stand after the nodes."""
        # Where rows are chosen, those in front are not copied away.
        front = 1 if self._front or self._session.requests == 1 else 0
        self._advance(result, logits if slots else logits[:0], self._plan.tree.num_nodes - 1, front)

    def _advance(self, result: AcceptResult, logits: Tensor, first: int, front: int) -> None:
        """Moves the rows past the accepted tokens.

        Args:
            logits: of the same number of rows of each request, the first of which is its row ``first``.
            front: how many of them are before the first slot.
        """
        offers, requests, offered = self._plan.offers, self._session.requests, dict[str, Any]()
        with profiled("draft"):
            if offers is not None and len(logits) > requests * front:
                if front:
                    logits = logits.view(requests, -1, logits.shape[-1])[:, front:].flatten(0, 1)
                offered = offers.top_of_rows(logits, requests) | {"first": first + front}
            self._next(result, offered)

    def _advance_some(self, result: AcceptResult, logits: Tensor, rows: Tensor) -> None:
        """As ``_advance``, with the logits of these rows [N] of all requests'."""
        offers, offered = self._plan.offers, dict[str, Any]()
        with profiled("draft"):
            if offers is not None and len(logits):
                offered = offers.top_of_rows(logits, 1)
                for name in ("offered", "scores"):
                    found = offered[name][0]
                    spread = found.new_empty(len(self._ids), found.shape[1])  # of other rows nothing is read
                    spread[rows] = found
                    offered[name] = spread.view(self._session.requests, -1, found.shape[1])
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
            costs=self._costs,
            text=self._text,
            **result._asdict(),
            **offered,
            **self._parameters,
        )

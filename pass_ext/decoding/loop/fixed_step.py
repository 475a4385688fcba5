"""``FixedStep``: draft, verify, accept and commit as one function over fixed buffers, which the device runs without the host.

    logits   = model(ids, positions)          of R rows per request: one tree for all requests and steps
    result   = accept_tree(logits, tokens)    and its keys and values go into the caches
    offered  = draft_sample(look-ahead rows of the logits)
    next_rows_(result, offered)               ids, tokens, positions, lengths for the next step; a report for the host

A step of the roots alone may stand between, where there are no candidates. Look-ahead rows of all groups are drafted from, not
only those behind the accepted node: so no row has to be found first.
With CUDA graphs the third step is recorded, and this and all later ones replay it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from pass_ext.decoding.drafting.from_lookahead import Offers
from pass_ext.decoding.loop.synthetic import Synthetic, spine_of
from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.recording import record_graph
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.session.uploads import uploaded
from pass_ext.ops.accept import AcceptResult, accept_tree
from pass_ext.ops.next import REPORT_NUMBERS, next_rows_
from pass_ext.tree import PackedTrees, Tree, pack_trees

_EAGER_STEPS = 2  # before the one that is recorded: kernels load, libraries allocate


@dataclass(frozen=True)
class FixedPlan:
    """The rows of every step of a generation."""

    candidates: Tree
    groups: tuple[tuple[int, int], ...] = ()
    """Nodes with look-ahead slots behind them, and how many slots: one number for all."""
    prompt_slots: int = 0
    """Look-ahead slots behind the last token of a prompt."""
    offers: Offers | None = None
    """None: without candidates."""

    @property
    def tree(self) -> Tree:
        """All rows of a request."""
        return self.candidates.with_lookahead(dict(self.groups)) if self.groups else self.candidates


class FixedStep:
    """The step of a plan, and the buffers that it works on.

    Args:
        session: opened.
        plan: the rows.
        sampling: of the batch.
        records: whether steps become a CUDA graph. "if possible": a model that no graph can hold goes on without one, with a
            warning.
        synthetic: accepts in place of rule "coupled"; None: the rule does.
    """

    def __init__(
        self,
        session: Session,
        plan: FixedPlan,
        sampling: BatchSampling,
        *,
        records: Literal["always", "if possible", "never"],
        synthetic: Synthetic | None = None,
    ) -> None:
        device, requests, tree = session.device, session.requests, plan.tree
        nodes = plan.candidates.num_nodes
        self._session, self._plan, self._nodes, self._slots = session, plan, nodes, len(tree) - nodes
        self._trees = pack_trees([tree] * requests, device)
        self._depth = plan.candidates.max_depth
        self._synthetic = synthetic
        self._spines = torch.tensor([spine_of(plan.candidates)] * requests, device=device)
        self._rows = torch.zeros(3, requests, len(tree), dtype=torch.int64, device=device)
        self._ids, self._tokens, self._positions = (rows.flatten() for rows in self._rows)
        self._parents = self._trees.parents[: len(tree)].clone()
        self._slot_ids = torch.tensor([-1 - slot for slot in tree.slots[nodes:]], dtype=torch.int64, device=device)
        groups = [tree.group_rows(node) for node in range(nodes)]
        first = [rows[0] - nodes if len(rows) else -1 for rows in groups]
        self._groups = torch.tensor(first, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(requests, dtype=torch.int64, device=device)
        self._limits = torch.zeros(requests, dtype=torch.int64, device=device)
        self.report = torch.zeros(requests, REPORT_NUMBERS + self._depth + 1, dtype=torch.int64, device=device)
        """``[B, 3 + A]``, as ``next_rows_`` writes it; the next step overwrites it."""
        self._sampling = BatchSampling(**{name: _copy(value) for name, value in sampling.keywords().items()})
        self._law = self._sampling.keywords()
        self._of_slots = self._sampling.repeated(self._slots)
        self._root_trees: dict[int, tuple[Tensor, PackedTrees]] = {}
        self._records: str = records
        self._eager_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self, lengths: Sequence[int], limits: Sequence[int], sampling: BatchSampling) -> None:
        """Begins texts of these lengths, to end at these limits."""
        device = self._session.device
        self._rows.zero_()
        self._rows[1].fill_(-1)
        self._rows[0, :, self._nodes :] = self._slot_ids
        self._lengths.copy_(uploaded(lengths, device), non_blocking=True)
        self.end_at(limits)
        for name, value in self._sampling.keywords().items():
            if value is not None:
                value.copy_(sampling.keywords()[name])
        for name, value in self._of_slots.keywords().items():
            if value is not None:
                value.copy_(self._sampling.repeated(self._slots).keywords()[name])

    def end_at(self, limits: Sequence[int]) -> None:
        """Ends texts at these lengths, from the next step on; 0: now."""
        self._limits.copy_(uploaded(limits, self._session.device), non_blocking=True)

    def accept_prompts(self, logits: Tensor) -> None:
        """The first step. logits: ``[B * (1 + slots), V]``, of the prompts' last tokens and the slots behind them."""
        slots = self._plan.prompt_slots
        self._advance_roots(self._accept(logits, *self._roots(slots), 0), logits, slots)

    @property
    def has_candidates(self) -> bool:
        """True if the rows of the next step hold candidates. The host waits for them."""
        return bool((self._rows[1, :, 1 : self._nodes] >= 0).any())

    def from_roots(self, slots: int) -> None:
        """A step of the roots without candidates, with so many look-ahead slots behind each: ``prompt_slots`` or 0."""
        session = self._session
        self._rows[1, :, 1 : self._nodes] = -1  # they are not judged
        tokens, trees = self._roots(slots)
        ahead = torch.arange(1 + slots, device=session.device)
        ids = torch.cat([self._rows[0, :, :1], (-ahead[1:]).expand(session.requests, -1)], dim=1)
        with profiled("verify"):
            logits = session.call_at(trees, ids.flatten(), (self._lengths[:, None] - 1 + ahead).flatten())
        result = self._accept(logits, tokens, trees, 0)
        with profiled("commit"):
            session.store(trees, result.path, result.num_accepted)
        self._advance_roots(result, logits, slots)

    def _roots(self, slots: int) -> tuple[Tensor, PackedTrees]:
        """The tokens, none of them a candidate, and the trees of roots with so many slots."""
        if slots not in self._root_trees:
            tree = Tree.chain(0).with_lookahead({0: slots}) if slots else Tree.chain(0)
            requests, device = self._session.requests, self._session.device
            none = torch.full((requests * (1 + slots),), -1, dtype=torch.int64, device=device)
            self._root_trees[slots] = none, pack_trees([tree] * requests, device)
        return self._root_trees[slots]

    def _advance_roots(self, result: AcceptResult, logits: Tensor, slots: int) -> None:
        device = self._session.device
        places = self._lengths[:, None] + torch.arange(slots, device=device)
        behind = logits.view(self._session.requests, 1 + slots, -1)[:, 1:]
        first = torch.zeros(1, dtype=torch.int32, device=device)
        self._advance(result, behind, places, first, self._sampling.repeated(slots))

    def __call__(self) -> None:
        """Runs a step."""
        if self._graph is not None:
            self._graph.replay()
        elif self._records == "never" or self._eager_steps < _EAGER_STEPS:
            self._eager_steps += 1
            self._run()
        else:
            self._record()

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

    def _run(self) -> None:
        session, trees = self._session, self._trees
        with profiled("verify"):
            logits = session.call_at(trees, self._ids, self._positions)
        result = self._accept(logits, self._tokens, trees, self._depth)
        with profiled("commit"):
            session.store(trees, result.path, result.num_accepted)
        slots = logits.view(session.requests, -1, logits.shape[-1])[:, self._nodes :]
        self._advance(result, slots, self._rows[2, :, self._nodes :], self._groups, self._of_slots)

    def _accept(self, logits: Tensor, tokens: Tensor, trees: PackedTrees, depth: int) -> AcceptResult:
        with profiled("accept"):
            if self._synthetic is not None:
                roots, spines = trees.cu_nodes[:-1].long(), self._spines[:, : depth + 1]
                return self._synthetic.accept(logits, tokens, spines, roots, self._lengths, self._sampling)
            return accept_tree(
                logits,
                tokens,
                trees.parents,
                trees.cu_nodes,
                depth,
                rule="coupled",
                positions=self._lengths,
                **self._law,
            )

    def _advance(
        self, result: AcceptResult, slots: Tensor, places: Tensor, groups: Tensor, sampling: BatchSampling
    ) -> None:
        """Moves the rows behind the accepted tokens.

        Args:
            result: of the rows as they are.
            slots: ``[B, S, V]``, logits of the look-ahead rows.
            places: ``[B, S]``, their text positions.
            groups: the first look-ahead row of each node's group, or -1.
            sampling: of each look-ahead row.
        """
        offers, requests = self._plan.offers, self._session.requests
        offered: dict[str, Any] = {}
        with profiled("draft"):
            if offers is not None and slots.shape[1]:
                foreseen = (places + 1).flatten() if offers.draws(self._sampling) else None
                offered = offers.of_rows(slots.flatten(0, 1), foreseen, sampling, requests)
                offered |= {"groups": groups} | self._law
            next_rows_(
                self._rows,
                self._lengths,
                self._session.prefix_lens,
                self.report,
                limits=self._limits,
                parents=self._parents,
                nodes=self._nodes,
                **result._asdict(),
                **offered,
            )


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()

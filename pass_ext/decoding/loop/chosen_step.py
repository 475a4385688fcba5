"""``ChosenStep``: a step whose rows are chosen at each place in the text, by the tokens that its look-ahead slots offer.

``next_tree_`` chooses candidates and slots on the device. All requests have R rows, of which some may not be in use, so that
shapes never change; where the host has read the step before, the model is called on those in use.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction
from pass_ext.decoding.drafting.lookahead.device_rows import ChosenRows
from pass_ext.decoding.loop.device_step import DeviceStep, Records
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.session import Session
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.next import TREE_REPORT_NUMBERS, next_tree_
from pass_ext.ops.tree import tree_prepare
from pass_ext.tree import PackedTrees, Tree

_USED, _NODES = 3, 4  # places in the report


class ChosenStep(DeviceStep):
    """The step of chosen rows. Arguments: as for ``DeviceStep``."""

    def __init__(
        self,
        session: Session,
        plan: ChosenRows,
        sampling: BatchSampling,
        accept: AcceptFunction,
        records: Records,
    ) -> None:
        device, requests, rows, slots = session.device, session.requests, plan.choice.rows, plan.prompt_slots
        deepest = Tree.chain(slots)
        shape = rows, deepest, slots, TREE_REPORT_NUMBERS
        recalls = plan.offers.recalls
        super().__init__(session, *shape, sampling, accept, records, recalls=recalls)
        self._plan = plan
        probe = Tree.chain(0).with_lookahead({0: slots})
        unused = rows - len(probe)
        integers: dict[str, Any] = dict(dtype=torch.int32, device=device)
        self._first_parents = torch.tensor([*probe.parents, *[0] * unused], **integers)
        self._first_ids = torch.tensor([0, *(-1 - slot for slot in range(slots)), *[0] * unused], device=device)
        self._parents = self._first_parents.repeat(requests, 1)
        self._flat_parents = self._parents.flatten()
        self._rates = torch.tensor(plan.choice.rates, device=device)
        self._price = torch.zeros(rows, device=device) if plan.choice.has_price else None
        self._bounds = torch.arange(0, requests * rows + 1, rows, **integers)
        count = plan.offers.most
        self._offered = torch.zeros(requests * rows, count, dtype=torch.int64, device=device)
        self._scores = torch.zeros(requests * rows, count, device=device)

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
        device = self._session.device
        bounds = torch.tensor([0, *accumulate(used)], dtype=torch.int32, device=device)
        picked = [b * most + row for b, count in enumerate(used) for row in range(count)]
        # Of one text they are the first ones, which need no copy.
        rows = slice(used[0]) if len(used) == 1 else torch.tensor(picked, device=device)
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
        """Moves the rows behind the accepted tokens.

        Args:
            result: of the rows as they are.
            logits: of these rows.
            first: the first row of each request that may be a look-ahead slot's.
        """
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

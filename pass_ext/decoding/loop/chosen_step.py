"""``ChosenStep``: a step whose rows are chosen at each place in the text, by the tokens that its look-ahead slots offer.

``next_tree_`` chooses candidates and slots on the device. All requests have R rows, of which some may not be in use, so that
shapes never change; one text on the CPU calls the model on those in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.drafting.lookahead.offers import Offers
from pass_ext.decoding.drafting.rows.choice import RowChoice
from pass_ext.decoding.drafting.rows.pace import Pauses
from pass_ext.decoding.loop.device_step import DeviceStep, Records
from pass_ext.decoding.loop.synthetic import Synthetic
from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.session import Session
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.next import TREE_REPORT_NUMBERS, next_tree_
from pass_ext.ops.tree import tree_prepare
from pass_ext.tree import PackedTrees, Tree

_USED, _NODES = 3, 4  # places in the report


@dataclass(frozen=True)
class ChosenPlan:
    """What the rows of each step are chosen by."""

    choice: RowChoice
    offers: Offers

    @property
    def prompt_slots(self) -> int:
        """Look-ahead slots behind the last token of a prompt."""
        return len(self.choice.rates)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for plans whose recorded steps are the same."""
        return self.choice.rows, self.choice.rates, self.offers.key

    def step(
        self, session: Session, sampling: BatchSampling, *, records: Records, synthetic: Synthetic | None
    ) -> ChosenStep:
        """The step of this plan."""
        return ChosenStep(session, self, sampling, records=records, synthetic=synthetic)


class ChosenStep(DeviceStep):
    """The step of a plan. Arguments: as for ``DeviceStep``."""

    def __init__(
        self,
        session: Session,
        plan: ChosenPlan,
        sampling: BatchSampling,
        *,
        records: Records,
        synthetic: Synthetic | None = None,
    ) -> None:
        device, requests, rows, slots = session.device, session.requests, plan.choice.rows, plan.prompt_slots
        deepest = Tree.chain(slots)
        shape = rows, deepest, TREE_REPORT_NUMBERS
        recalls = plan.offers.recalls
        super().__init__(session, *shape, sampling, recalls=recalls, records=records, synthetic=synthetic)
        self._plan, self._prices = plan, plan.choice.prices
        probe = Tree.chain(0).with_lookahead({0: slots})
        unused = rows - len(probe)
        integers: dict[str, Any] = dict(dtype=torch.int32, device=device)
        self._first_parents = torch.tensor([*probe.parents, *[0] * unused], **integers)
        self._first_ids = torch.tensor([0, *(-1 - slot for slot in range(slots)), *[0] * unused], device=device)
        self._parents = self._first_parents.repeat(requests, 1)
        self._flat_parents = self._parents.flatten()
        self._rates = torch.tensor(plan.choice.rates, device=device)
        self._price = None if self._prices is None else torch.zeros(rows, device=device)
        self._bounds = torch.arange(0, requests * rows + 1, rows, **integers)
        self._bounds_of_one = [torch.tensor([0, count], **integers) for count in range(rows + 1)]
        self._used, self._nodes = 1, 1

    def begin(self, texts: Sequence[Sequence[int]], limits: Sequence[int], sampling: BatchSampling) -> None:
        """As ``DeviceStep``."""
        super().begin(texts, limits, sampling)
        self._rows[0] = self._first_ids
        self._parents.copy_(self._first_parents.expand_as(self._parents))

    def accept_prompts(self, logits: Tensor) -> None:
        """As ``DeviceStep``."""
        self._advance(self._accept(logits, *self._roots(self._plan.prompt_slots), 0), logits, 1)

    def read(self) -> list[list[int]]:
        """As ``DeviceStep``."""
        report = super().read()
        self._used, self._nodes = report[0][_USED], report[0][_NODES]
        return report

    def run_needed(self, drafts: bool) -> int:
        """As ``DeviceStep``."""
        if not drafts and self._used > 1:
            self._tokens[1:] = -1  # they are not judged
            self._used = self._nodes = 1
        used, nodes = self._used, self._nodes
        trees = self._packed(self._flat_parents[:used], self._bounds_of_one[used], used)
        logits, result = self._judged(
            trees, self._ids[:used], self._tokens[:used], self._positions[:used], self._depth if nodes > 1 else 0
        )
        self._advance(result, logits, nodes)
        return used

    @property
    def rows_needed(self) -> int | None:
        """As ``DeviceStep``."""
        return self._used

    def price_by(self, pauses: Pauses, rows: int = 0, tokens: int = 0) -> None:
        """As ``DeviceStep``."""
        if self._prices is None or self._price is None:
            return
        if rows:
            self._prices.add(tokens, pauses.seconds_of(rows))
        prices = self._prices.of_rows(len(self._price), pauses)
        if prices is not None:
            self._price.copy_(torch.tensor(prices))

    def _run(self) -> None:
        trees = self._packed(self._flat_parents, self._bounds, self._rows.shape[2])
        logits, result = self._judged(trees, self._ids, self._tokens, self._positions, self._depth)
        self._advance(result, logits, 0)

    def _packed(self, parents: Tensor, bounds: Tensor, rows: int) -> PackedTrees:
        return PackedTrees(parents, bounds, rows, *tree_prepare(parents, bounds, rows))

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
                **self._law,
            )

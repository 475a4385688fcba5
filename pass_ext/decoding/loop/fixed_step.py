"""``FixedStep``: a step of one tree for all requests and steps.

Look-ahead rows of all groups are drafted from, not only those behind the accepted node: so no row has to be found first. A step
of the roots alone may stand between, where there are no candidates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction
from pass_ext.decoding.drafting.lookahead.device_rows import FixedRows
from pass_ext.decoding.loop.device_step import DeviceStep, Records
from pass_ext.decoding.loop.texts import Texts
from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.session import Session
from pass_ext.ops.accept import AcceptResult
from pass_ext.ops.next import REPORT_NUMBERS, next_rows_
from pass_ext.tree import pack_trees


class FixedStep(DeviceStep):
    """The step of one tree. Arguments: as for ``DeviceStep``."""

    def __init__(
        self,
        session: Session,
        plan: FixedRows,
        sampling: BatchSampling,
        accept: AcceptFunction,
        records: Records,
    ) -> None:
        device, requests, tree = session.device, session.requests, plan.tree
        nodes = plan.candidates.num_nodes
        recalls = plan.offers is not None and plan.offers.recalls
        shape = len(tree), plan.candidates, plan.prompt_slots, REPORT_NUMBERS
        super().__init__(session, *shape, sampling, accept, records, recalls=recalls)
        self._plan, self._nodes, self._slots = plan, nodes, len(tree) - nodes
        self._trees = pack_trees([tree] * requests, device)
        self._parents = self._trees.parents[: len(tree)].clone()
        self._slot_ids = torch.tensor([-1 - slot for slot in tree.slots[nodes:]], dtype=torch.int64, device=device)
        groups = [tree.group_rows(node) for node in range(nodes)]
        first = [rows[0] - nodes if len(rows) else -1 for rows in groups]
        self._groups = torch.tensor(first, dtype=torch.int32, device=device)
        self._of_slots = self._sampling.repeated(self._slots)

    def begin(self, texts: Texts, known: int) -> int:
        for name, value in self._of_slots.keywords().items():
            if value is not None:
                value.copy_(self._sampling.repeated(self._slots).keywords()[name])
        return super().begin(texts, known)

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
        """A step of the roots without candidates, with so many look-ahead slots behind each: those of a prompt, or 0."""
        session = self._session
        self._row_tokens[:, 1 : self._nodes] = -1  # they are not judged
        tokens, trees = self._roots(slots)
        ahead = torch.arange(1 + slots, device=session.device)
        ids = torch.cat([self._row_ids[:, :1], (-ahead[1:]).expand(session.requests, -1)], dim=1)
        positions = (self._lengths[:, None] - 1 + ahead).flatten()
        logits, result = self._judged(trees, ids.flatten(), tokens, positions, 0)
        self._advance_roots(result, logits, slots)

    def _advance_roots(self, result: AcceptResult, logits: Tensor, slots: int) -> None:
        device = self._session.device
        places = self._lengths[:, None] + torch.arange(slots, device=device)
        behind = logits.view(self._session.requests, 1 + slots, -1)[:, 1:]
        first = torch.zeros(1, dtype=torch.int32, device=device)
        self._advance(result, behind, places, first, self._sampling.repeated(slots))

    def _run(self) -> None:
        logits, result = self._judged(self._trees, self._ids, self._tokens, self._positions, self._depth)
        slots = logits.view(self._session.requests, -1, logits.shape[-1])[:, self._nodes :]
        self._advance(result, slots, self._row_positions[:, self._nodes :], self._groups, self._of_slots)

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

"""``PackedChains``: the drafts of B requests as ``accept_tree`` takes them, and ``accept_chains``, one accept step over them.

request b owns rows cu_nodes[b] : cu_nodes[b + 1], one more than its drafts; its first row is its root
parents[i] = i - 1 inside a request, -1 at its root
draft_rows[i] = the number of the draft that follows row i, counted over all requests; -1 behind the last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.ops.accept import accept_tree
from pass_ext.ops.common.rules import ACCEPT_RULES


@dataclass(frozen=True)
class PackedChains:
    """The layout of one step. It depends on the numbers of drafts alone, so steps with the same numbers share it."""

    drafts: tuple[int, ...]
    """``[B]``, the drafted tokens of each request."""
    draft_counts: Tensor
    """The same as a tensor, int64 ``[B]``."""
    cu_nodes: Tensor
    """``[B + 1]`` int32."""
    parents: Tensor
    """``[N]`` int32."""
    draft_rows: Tensor
    """``[N]`` int32."""
    draft_nodes: Tensor
    """The rows that are drafts, int64, in the order of ``draft_rows``."""

    @classmethod
    def of(cls, drafts: Sequence[int], device: torch.device) -> PackedChains:
        """The layout for these numbers of drafts."""
        counts = numpy.array(drafts, dtype=numpy.int64)
        bounds = numpy.concatenate([[0], numpy.cumsum(counts + 1)])
        parents = numpy.arange(bounds[-1]) - numpy.repeat(bounds[:-1], counts + 1) - 1
        nodes = numpy.flatnonzero(parents >= 0)
        draft_rows = numpy.full(bounds[-1], -1)
        draft_rows[nodes - 1] = numpy.arange(len(nodes))

        def tensor(numbers: numpy.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(numbers).to(dtype).to(device, non_blocking=True)

        return cls(
            drafts=tuple(drafts),
            draft_counts=tensor(counts, torch.int64),
            cu_nodes=tensor(bounds, torch.int32),
            parents=tensor(parents, torch.int32),
            draft_rows=tensor(draft_rows, torch.int32),
            draft_nodes=tensor(nodes, torch.int64),
        )

    @property
    def width(self) -> int:
        """The most tokens that a request of the step can get."""
        return max(self.drafts, default=0) + 1

    def tokens(self, draft_ids: Tensor | None) -> Tensor:
        """The input token of each row, int64 ``[N]``: the drafts' ids, -1 at roots."""
        tokens = torch.full_like(self.parents, -1, dtype=torch.int64)
        if draft_ids is not None and len(self.draft_nodes):
            tokens[self.draft_nodes] = draft_ids.long()
        return tokens


def accept_chains(
    chains: PackedChains,
    logits: Tensor,
    tokens: Tensor,
    rule: str,
    sampling: BatchSampling,
    positions: Tensor,
    draft_probs: Tensor | None = None,
) -> Tensor:
    """The tokens that one step gives to each request, int64 ``[B, width]``: accepted drafts, the target's token, then -1.

    Args:
        logits: ``[N, V]``. A draft outside [0, V) is rejected.
        tokens: ``[N]``, from ``chains.tokens``.
        draft_probs: ``[drafts, V]``: the probabilities that the drafts were drawn with. None: they are fixed proposals.

    A request whose root has no usable row (NaN, or no token is allowed) gets token 0, because vLLM needs one.
    """
    draft: dict[str, Any] = {}
    if not sampling.is_greedy and ACCEPT_RULES[rule].needs_draft_logits:
        if draft_probs is not None:
            # The probabilities are processed already: the target's own parameters would filter them twice.
            draft = dict(draft_logits=draft_probs.log(), draft_rows=chains.draft_rows)
            draft |= dict(draft_temperature=1.0, draft_top_k=0, draft_top_p=1.0, draft_min_p=0.0)
        else:
            draft = dict(draft_logits=logits[:1], draft_rows=torch.full_like(chains.parents, -1))
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        logits = logits.float()
    emitted = accept_tree(
        logits, tokens, chains.parents, chains.cu_nodes, chains.width - 1, rule=rule, positions=positions,
        **sampling.keywords(), **draft,
    ).emitted  # fmt: skip
    emitted[:, 0].clamp_(min=0)
    return emitted

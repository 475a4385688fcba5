"""``PackedChains``: the drafts of B requests as ``accept_tree`` takes them, and ``accept_chains``, one accept step over them.

request b owns rows cu_nodes[b] : cu_nodes[b + 1], one more than its drafts; its first row is its root
parents[i] = i - 1 inside a request, -1 at its root
draft_rows[i] = the number of the draft that follows row i, counted over all requests; -1 after the last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.synthetic import SyntheticAcceptance
from pass_ext.ops.accept import accept_tree
from pass_ext.ops.common.rules import ACCEPT_RULES
from pass_ext.ops.common.uploaded import sent

_FRESH = "pass_ext_seed"


class SampledStep(NamedTuple):
    """One step of B requests. Request b has ``drafts[b] + 1`` rows of logits, the root's first, all requests' back to back."""

    request_ids: Sequence[str]
    """``[B]``, vLLM's names of the requests."""
    logits: Tensor
    """``[N, V]``, the model's own, after grammar masks and before penalties."""
    tokens: Tensor
    """``[N]`` int64: each row's input token; -1 for a root, whose token no decision needs."""
    drafts: Sequence[int]
    """``[B]``, the drafted tokens of each request."""
    emitted: Tensor
    """``[B, max(drafts) + 1]``: the tokens that the step gave, then -1."""
    positions: Tensor
    """``[B]`` int64: the text position of the first emitted token, the prompt's first token having 0."""
    sampling: BatchSampling
    """The requests' sampling parameters and seeds."""


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
            return sent(torch.from_numpy(numbers).to(dtype), device)

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


def synthetic_of(vllm_config: Any) -> SyntheticAcceptance | None:
    """The coins of an engine; None unless its configuration asks for them."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.rejection_sample_method != "synthetic":
        return None
    return SyntheticAcceptance(list(speculative.synthetic_acceptance_rates))


def accept_by_coins(
    synthetic: SyntheticAcceptance,
    chains: PackedChains,
    logits: Tensor,
    tokens: Tensor,
    sampling: BatchSampling,
    positions: Tensor,
) -> Tensor:
    """The tokens that one step gives to each request, as ``accept_chains`` returns them."""
    places = torch.arange(chains.width, device=logits.device)
    spines = places.where(places <= chains.draft_counts[:, None], -1)
    emitted = synthetic.along(logits, tokens, spines, chains.cu_nodes[:-1].long(), positions, sampling).emitted
    emitted[:, 0].clamp_(min=0)
    return emitted


def seed_of(request: Any) -> int:
    """The user's seed, or a fresh one from torch's default generator; an int64, kept at the runner's state of the request.

    Ranks of a tensor-parallel group agree: vLLM seeds the default generator alike in each.
    """
    seed = request.sampling_params.seed
    if seed is not None:
        return (seed + 2**63) % 2**64 - 2**63  # torch takes seeds up to 2^64 - 1 too
    if not hasattr(request, _FRESH):
        setattr(request, _FRESH, int(torch.randint(-(2**63), 2**63 - 1, ())))
    fresh: int = getattr(request, _FRESH)
    return fresh

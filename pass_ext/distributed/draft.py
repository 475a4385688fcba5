"""``draft_sample`` for ranks that hold some columns of the logits each: the same drafts on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pass_ext.distributed.arguments import agreed, seeds_tensor
from pass_ext.distributed.exchange import Steps, run
from pass_ext.distributed.layout import Layout, columns_of, layout_of
from pass_ext.distributed.steps import Shard, Trees, best_steps
from pass_ext.ops import draft as whole
from pass_ext.ops.common.arguments import (
    SAMPLING,
    Parameter,
    check_positions,
    parameter_tensor,
    sampling_tensors,
    typed,
)

Drafts = tuple[Tensor, Tensor]


@typed("pass_ext.distributed.", page="distributed")
def draft_sample(
    logits: Tensor,
    k: int,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | Sequence[int] | None = None,
    vocab_size: int | None = None,
    gather_below: int = 0,
    mode: str = "without",
    temperature: Parameter = None,
    top_k: Parameter = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
    allowed: Tensor | None = None,
    seeds: Parameter = None,
    positions: Parameter = None,
    nodes: Parameter = None,
) -> Drafts:
    """``pass_ext.draft_sample`` on logits ``[R, C]`` whose columns the ranks of a group hold. All ranks get the same drafts and
    log probabilities: those of the op on all columns, to the bit.

    ``group``, ``vocab_start``, ``vocab_size``, ``gather_below``, masks and seeds are as in
    ``pass_ext.distributed.accept_tree``, the other arguments those of ``pass_ext.draft_sample``.

    Exchanges per call: 3; top-k adds 6, top-p 7, and columns that move 1. Gathered: 1.
    """
    columns = columns_of("draft_sample", logits, group, vocab_start, vocab_size)
    steps = draft_steps(
        columns.rank, layout_of(columns), columns.local, k, gather_below=gather_below, mode=mode,
        target=(temperature, top_k, top_p, min_p), allowed=allowed, seeds=seeds, positions=positions, nodes=nodes,
    )  # fmt: skip
    return run(steps, columns.group)


def draft_steps(
    rank: int,
    layout: Layout,
    logits: Tensor,
    k: int,
    *,
    gather_below: int = 0,
    mode: str = "without",
    target: tuple[Parameter, ...] = (None,) * 4,
    allowed: Tensor | None = None,
    seeds: Parameter = None,
    positions: Parameter = None,
    nodes: Parameter = None,
) -> Steps[Drafts]:
    """The steps of ``draft_sample`` on one rank; ``target``: temperature, top_k, top_p and min_p."""
    if mode not in whole.MODES:
        raise ValueError(
            f"pass_ext.distributed.draft_sample: mode must be one of {', '.join(whole.MODES)}, got {mode!r}"
        )
    yield from agreed("draft_sample", locals())
    rows, device = logits.shape[0], logits.device

    def column(name: str, value: Parameter, dtype: torch.dtype) -> Tensor | None:
        return parameter_tensor("draft_sample", name, value, rows, dtype, device)

    sampling = sampling_tensors("draft_sample", target, rows, device)
    check_positions("pass_ext.distributed.draft_sample", seeds, positions, draws=whole.draws(mode, target[0]))
    temperature = sampling[0]
    draws_nothing = mode == "top" or (mode == "coupled" and temperature is None)
    noise = {
        "seeds": seeds_tensor("draft_sample", seeds, rows, device, draws_nothing),
        "positions": column("positions", positions, torch.int64),
        "nodes": column("nodes", nodes, torch.int32),
    }
    shard = Shard(rank, layout, (logits,), (allowed,)).without_padding()
    if rows < gather_below:
        (all_logits,) = yield from shard.whole()
        law: dict[str, Any] = dict(zip(SAMPLING, sampling, strict=True)) | noise
        return whole.draft_sample(all_logits, k, mode=mode, **law)
    if temperature is None:
        is_greedy, warm = torch.full((rows,), mode == "coupled", device=device), torch.ones(rows, device=device)
    else:
        is_greedy = ~(temperature > 0)
        warm = temperature.where(~is_greedy, 1.0)
    off = (0, 1.0, 0.0)  # greedy rows are ranked unfiltered
    filters = [
        None if v is None else v.where(~is_greedy, n).contiguous() for v, n in zip(sampling[1:], off, strict=True)
    ]
    trees = Trees(
        tokens=torch.zeros(rows, dtype=torch.int64, device=device),
        parents=torch.full((rows,), -1, dtype=torch.int32, device=device),
        cu_nodes=torch.arange(rows + 1, dtype=torch.int32, device=device),
        max_depth=0,
        rule="rejection",
        draft_rows=None,
        target_sampling=(warm.contiguous(), *filters),
        draft_sampling=(None,) * 4,
        seeds=None,
        positions=None,
        residuals=0,
        greedy=False,
    )
    tokens, logprobs = yield from best_steps(trees, shard, k, mode=mode, temperature=temperature, **noise)
    return tokens, _concentrated(tokens, logprobs, is_greedy, mode)


def _concentrated(tokens: Tensor, logprobs: Tensor, is_greedy: Tensor, mode: str) -> Tensor:
    """In greedy rows the first token has all the probability."""
    certain = torch.full_like(logprobs, -torch.inf)
    certain[:, : None if mode == "with" else 1] = 0.0
    is_row = (tokens[:, :1] >= 0) & is_greedy[:, None]
    return certain.where(is_row, logprobs)

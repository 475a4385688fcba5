"""Puts the arguments of accept_tree, accept_chain and draft_sample into the form of steps.py: tensors as the ops take them, and
what the host knows without reading a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pass_ext.distributed.rounds import residual_rounds, residual_rounds_of_chain
from pass_ext.distributed.steps import Trees
from pass_ext.ops.common.integers import integers
from pass_ext.ops.common.parameters import Parameter, check_positions, is_greedy, parameter_tensor
from pass_ext.ops.common.rules import ACCEPT_RULES

Sampling = Sequence[Parameter]  # temperature, top_k, top_p, min_p
NAMES = (("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32))


def check_rule(op: str, rule: str, has_draft: bool) -> None:
    """Raises ValueError for an unknown rule, and for one that divides by draft logits without them."""
    if rule not in ACCEPT_RULES:
        raise ValueError(f"pass_ext.distributed.{op}: rule must be one of {', '.join(ACCEPT_RULES)}, got {rule!r}")
    if rule in ("rejection_with_replacement", "kseq") and not has_draft:
        raise ValueError(f"pass_ext.distributed.{op}: draft_logits must be given for rule {rule!r}, got None")


def sampling_tensors(op: str, requests: int, device: torch.device, target: Sampling, draft: Sampling):  # type: ignore[no-untyped-def]
    """Four tensors or None for the target, and four for the draft: those of the target where the draft has None."""
    tensors = [
        parameter_tensor(op, name, value, requests, dtype, device)
        for (name, dtype), value in zip(NAMES, target, strict=True)
    ]
    drafts = [
        tensor if value is None else parameter_tensor(op, f"draft_{name}", value, requests, dtype, device)
        for (name, dtype), value, tensor in zip(NAMES, draft, tensors, strict=True)
    ]
    return tuple(tensors), tuple(drafts)


def seeds_tensor(op: str, seeds: Parameter, rows: int, device: torch.device, draws_nothing: bool) -> Tensor | None:
    """The seeds. Ranks that drew their own would disagree, so None is refused where anything is drawn."""
    if seeds is None and not draws_nothing:
        raise ValueError(
            f"pass_ext.distributed.{op}: seeds must be given, the same on all ranks (each would draw its own), got None"
        )
    return parameter_tensor(op, "seeds", seeds, rows, torch.int64, device)


def trees_of(
    op: str,
    tokens: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    max_depth: int,
    rule: str,
    draft_rows: Tensor | None,
    target: Sampling,
    draft: Sampling,
    seeds: Parameter,
    positions: Parameter,
    chain: int | None,
    has_draft: bool,
) -> Trees:
    """The trees; ``chain``: the length of each request's chain, None for trees."""
    device, requests = tokens.device, cu_nodes.shape[0] - 1
    greedy = is_greedy(target[0])
    if greedy or not has_draft or rule not in ("rejection", "rejection_with_replacement", "block", "traversal"):
        residuals = 0
    elif chain is not None:
        residuals = residual_rounds_of_chain(rule, chain)
    else:
        residuals = residual_rounds(rule, parents.tolist(), cu_nodes.tolist())
    check_positions(f"pass_ext.distributed.{op}", seeds, positions, draws=not greedy)
    target_sampling, draft_sampling = sampling_tensors(op, requests, device, target, draft)
    return Trees(
        tokens=_dense(op, "tokens", tokens, torch.int64),
        parents=_dense(op, "parents", parents, torch.int32),
        cu_nodes=_dense(op, "cu_nodes", cu_nodes, torch.int32),
        max_depth=max_depth,
        rule=rule,
        draft_rows=None if draft_rows is None else _dense(op, "draft_rows", draft_rows, torch.int32),
        target_sampling=target_sampling,
        draft_sampling=draft_sampling,
        seeds=seeds_tensor(op, seeds, requests, device, greedy),
        positions=parameter_tensor(op, "positions", positions, requests, torch.int64, device),
        residuals=residuals,
        greedy=greedy,
    )


def _dense(op: str, argument: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return integers(op, argument, tensor, dtype).contiguous()

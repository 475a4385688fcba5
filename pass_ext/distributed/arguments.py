"""Puts the arguments of accept_tree, accept_chain and draft_sample into the form of steps.py: tensors as the ops take them, and
what the host knows without reading a device. In debug mode compares those of all ranks: ranks that disagree would wait for each
other, or decide differently.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext import _library
from pass_ext.distributed.exchange import Gather, Steps
from pass_ext.distributed.steps import Trees, residual_rounds, residual_rounds_of_chain
from pass_ext.ops.common.arguments import (
    SAMPLING,
    Parameter,
    check_positions,
    integers,
    is_greedy,
    parameter_tensor,
    target_and_draft,
)
from pass_ext.ops.common.rules import ACCEPT_RULES

Sampling = Sequence[Parameter]  # temperature, top_k, top_p, min_p
_LOCAL = ("rank", "target_logits", "draft_logits", "allowed", "draft_allowed", "logits")


def check_rule(op: str, rule: str, has_draft: bool) -> None:
    """Raises ValueError for an unknown rule, and for one that divides by draft logits without them."""
    if rule not in ACCEPT_RULES:
        raise ValueError(f"pass_ext.distributed.{op}: rule must be one of {', '.join(ACCEPT_RULES)}, got {rule!r}")
    if rule in ("rejection_with_replacement", "kseq") and not has_draft:
        raise ValueError(f"pass_ext.distributed.{op}: draft_logits must be given for rule {rule!r}, got None")


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
    target_sampling, draft_sampling = target_and_draft(op, target, draft, requests, device)
    return Trees(
        tokens=_dense(op, "tokens", tokens, torch.int64),
        parents=_dense(op, "parents", parents, torch.int32),
        cu_nodes=_dense(op, "cu_nodes", cu_nodes, torch.int32),
        max_depth=max_depth,
        rule=rule,
        draft_rows=None if draft_rows is None else _dense(op, "draft_rows", draft_rows, torch.int32),
        target_sampling=tuple(target_sampling),
        draft_sampling=tuple(draft_sampling),
        seeds=seeds_tensor(op, seeds, requests, device, greedy),
        positions=parameter_tensor(op, "positions", positions, requests, torch.int64, device),
        residuals=residuals,
        greedy=greedy,
    )


def _dense(op: str, argument: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return integers(op, argument, tensor, dtype).contiguous()


def agreed(op: str, arguments: Mapping[str, Any]) -> Steps[None]:
    """Raises ValueError on every rank if a rank's arguments are not those of rank 0; names both. Does nothing outside debug
    mode. One exchange of 8 bytes for each argument."""
    if not _library.debug_enabled():
        return
    prints = _fingerprints(arguments)
    device = next(value for value in arguments.values() if isinstance(value, Tensor)).device
    everyone = (yield Gather(torch.tensor(list(prints.values()), device=device))).tolist()
    for rank, others in enumerate(everyone):
        for name, first, other in zip(prints, everyone[0], others, strict=True):
            if first != other:
                raise ValueError(
                    f"pass_ext.distributed.{op}: {name} must be the same on all ranks, got another on rank {rank} than on "
                    "rank 0"
                )


def _fingerprints(arguments: Mapping[str, Any]) -> dict[str, int]:
    """One number for each argument, and for the shape and dtype of those whose columns differ from rank to rank."""
    prints = {}
    for name, value in arguments.items():
        if name in ("target", "draft"):
            prefix = "" if name == "target" else "draft_"
            prints.update({prefix + part: _hash(number) for part, number in zip(SAMPLING, value, strict=True)})
        elif name in _LOCAL[1:]:
            described = None if value is None else (str(value.dtype), tuple(value.shape[:-1]))
            prints[f"the shape or dtype of {name}"] = _hash(described)
        elif name == "layout":
            prints["vocab_start or vocab_size"] = _hash(value)
        elif name != "rank":
            prints[name] = _hash(value)
    return prints


def _hash(value: Any) -> int:
    if isinstance(value, Tensor):
        return zlib.crc32(repr((str(value.dtype), tuple(value.shape), value.tolist())).encode())
    return zlib.crc32(repr(value).encode())

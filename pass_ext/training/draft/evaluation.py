"""The held-out evaluation of an early-exit draft on text that the model wrote: hit rates, accepted chains, expected speed.

The draft sees the text through the target's first k layers, so a token has the same row in the text and in a draft that was
right up to it: one forward gives all depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.early_exit import exit_parts
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.rates import TOPS, accepted_length, hit_rates, ranks_among
from pass_ext.training.draft.loop import Hidden

RANKS, DEPTHS = 8, 6
CHAIN = 4
_ROWS = 256


def ranks_of_tokens(model: Any, adapter: ExitAdapter, after: Tensor, following: Tensor) -> Tensor:
    """``[N]``: rank of ``following`` [N] among the draft's logits of the rows ``after`` [N, d]; V for tokens that the
    draft's head lacks. Equal logits stand in the order of their ids."""
    parts = exit_parts(model)
    weight, bias = parts.head.weight.detach(), parts.head.bias
    ids = torch.arange(len(weight)) if adapter.vocabulary is None else adapter.vocabulary.long().cpu()
    place = torch.full((len(weight),), -1).index_copy_(0, ids, torch.arange(len(ids)))[following]
    ranks = torch.full((len(following),), len(weight))
    with torch.no_grad():
        table, offset = weight[ids], 0 if bias is None else bias[ids]
        for picked in (place >= 0).nonzero()[:, 0].split(_ROWS):
            rows = parts.norm(adapter(after[picked].to(table.device, table.dtype)))
            ranks[picked] = ranks_among((rows @ table.T + offset).float().cpu(), place[picked])
    return ranks


def weights_read(model: Any, adapter: ExitAdapter) -> float:
    """Parameters that a call of the draft reads, as a share of those that a call of the target does."""
    parts = exit_parts(model)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in parts.layers]
    tokens = parts.head.out_features if adapter.vocabulary is None else len(adapter.vocabulary)
    draft = sum(layers[: adapter.layers]) + tokens * adapter.dim + 2 * adapter.rank * adapter.dim
    return draft / (sum(layers) + parts.head.weight.numel())


def evaluate_draft(model: Any, adapter: ExitAdapter, samples: Sequence[Sample], hidden: Hidden) -> dict[str, Any]:
    """On ``samples``, whose rows ``hidden`` holds in the same order; counted are the places in what the model wrote."""
    ranks_by_kind: dict[str, list[Tensor]] = {}
    start = 0
    for sample in samples:
        first, end = start + sample.prompt_tokens - 1, start + len(sample.ids)
        start = end
        if end - 1 - first >= DEPTHS:
            following = hidden.tokens[first + 1 : end].long()
            ranks = ranks_of_tokens(model, adapter, hidden.after[adapter.layers][first : end - 1], following)
            ranks_by_kind.setdefault(sample.kind, []).append(ranks.unfold(0, DEPTHS, 1))
    if not ranks_by_kind:
        return {"places": 0}
    by_kind = {kind: torch.cat(parts) for kind, parts in sorted(ranks_by_kind.items())}
    ranks = torch.cat(list(by_kind.values()))
    cost = weights_read(model, adapter)
    tokens = {length: 1 + _chain(ranks, length) for length in range(1, DEPTHS + 1)}
    speeds = {length: count / (1 + length * cost) for length, count in tokens.items()}
    best = max(speeds, key=lambda length: speeds[length])
    return {
        "places": len(ranks),
        "texts": sum(map(len, ranks_by_kind.values())),
        "temperatures": sorted({sample.temperature for sample in samples}),
        "tops": {f"top {top}": round(float((ranks[:, 0] < top).float().mean()), 4) for top in TOPS},
        "hit_rates": hit_rates(ranks, RANKS),
        "chain": round(_chain(ranks, CHAIN), 4),
        "chain_by_kind": {kind: round(_chain(kind_ranks, CHAIN), 4) for kind, kind_ranks in by_kind.items()},
        "top1_by_kind": {
            kind: round(float((kind_ranks[:, 0] == 0).float().mean()), 4) for kind, kind_ranks in by_kind.items()
        },
        "places_by_kind": {kind: len(kind_ranks) for kind, kind_ranks in by_kind.items()},
        "weights_read": round(cost, 4),
        "best_chain": best,
        "speedup": round(speeds[best], 4),
    }


def _chain(ranks: Tensor, length: int) -> float:
    return accepted_length(ranks, {(0,) * depth for depth in range(1, length + 1)})

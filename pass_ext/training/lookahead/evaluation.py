"""The held-out evaluation: at which rank the slots hold the token that the model then wrote.

Texts are the model's own continuations of held-out prompts; places lie in what it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.training.common.frozen_model import text_rows
from pass_ext.training.common.loss import CHUNK
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.rates import accepted_lengths, hit_rates, ranks_among, top_rates
from pass_ext.training.common.windows import even_places
from pass_ext.training.lookahead.forward import slot_rows, transition_hidden


def ranks_of(model: Any, embedding: LookaheadEmbedding, ids: Tensor, anchors: Tensor) -> Tensor:
    """``[A, L]``: rank of ``ids[a + 2 + i]`` among slot i's candidates; equal scores stand in the order of their ids."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    slots = embedding.num_lookahead
    with torch.no_grad():
        _, past = text_rows(model, ids[None])
        hidden = slot_rows(model, embedding, anchors[None], past)[0].flatten(0, 1)
        depth = torch.arange(slots, device=ids.device)
        previous, right = (ids[anchors[:, None] + ahead + depth].flatten() for ahead in (1, 2))
        ranks = torch.empty_like(right)
        for picked in torch.arange(len(right), device=ids.device).split(CHUNK):
            logits = head(hidden[picked]).float()
            if embedding.rank:
                logits += (transition_hidden(embedding, table, previous[picked]) @ table.T).float()
            ranks[picked] = ranks_among(logits, right[picked])
    return ranks.unflatten(0, (len(anchors), slots))


def evaluate(model: Any, embedding: LookaheadEmbedding, samples: Sequence[Sample], anchors: int) -> dict[str, Any]:
    """Hit rates and accepted lengths over all samples and by kind, at ``anchors`` even places a sample at most."""
    device = model.get_input_embeddings().weight.device
    ranks_by_kind: dict[str, list[Tensor]] = {}
    for sample in samples:
        # The first place has the last token of the prompt as its new root.
        places = torch.arange(max(sample.prompt_tokens - 2, 0), len(sample.ids) - 1 - embedding.num_lookahead)
        if len(places):
            even = even_places(places, anchors)
            ids = torch.tensor(sample.ids, device=device)
            ranks_by_kind.setdefault(sample.kind, []).append(ranks_of(model, embedding, ids, even.to(device)).cpu())
    if not ranks_by_kind:
        return {"places": 0}
    by_kind = {kind: torch.cat(parts) for kind, parts in sorted(ranks_by_kind.items())}
    ranks = torch.cat(list(by_kind.values()))
    rates = hit_rates(ranks)
    return {
        "places": len(ranks),
        "texts": sum(map(len, ranks_by_kind.values())),
        "temperatures": sorted({sample.temperature for sample in samples}),
        "hit_rates": rates,
        "slots": top_rates(ranks),
        "accepted": accepted_lengths(ranks, rates),
        "accepted_by_kind": {kind: accepted_lengths(kind_ranks, rates) for kind, kind_ranks in by_kind.items()},
        "places_by_kind": {kind: len(kind_ranks) for kind, kind_ranks in by_kind.items()},
    }

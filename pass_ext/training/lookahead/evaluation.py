"""The held-out evaluation: at which rank the slots hold the token that the model then wrote, and how near they come to its
distribution.

Texts are the model's own continuations of held-out prompts; places lie in what it wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.recall import MAX_RECALL_ROW, RECALL_TOKENS, recall_scores
from pass_ext.training.common.loss import chunk_rows
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.ranks import Ranks
from pass_ext.training.common.rates import accepted_lengths, hit_rates, ranks_among, top_rates
from pass_ext.training.common.run import even_places
from pass_ext.training.lookahead.loop import read_texts, slot_rows, transition_hidden

_ANCHORS = 64  # whose groups are read at once


class SlotHits(NamedTuple):
    """How near slots come to what the model then does, ``[A, L]`` each."""

    ranks: Tensor
    """Of ``ids[a + 2 + i]`` among slot i's candidates; equal scores stand in the order of their ids."""
    overlaps: Tensor
    """Sum of min(p, q): the chance that a token drawn from slot i's distribution is accepted, 1 - their total variation."""


class _Read(NamedTuple):
    """A text that was read, with slots: their last hidden states, and those and the places of their teachers."""

    ids: Tensor
    hidden: Tensor
    text: Tensor
    place: Tensor


@torch.no_grad()
def hits_of(
    model: Any, embedding: LookaheadEmbedding, ids: Tensor, anchors: Tensor, *, recalls: bool = False
) -> SlotHits:
    """The hits of the slots after ``anchors`` [A] of a text, the tokens before each being the right ones. recalls: with what
    the text recalls of its last 1,024 different tokens."""
    return _hits(model, embedding, _read(model, embedding, ids, anchors), recalls=recalls)


def _read(model: Any, embedding: LookaheadEmbedding, ids: Tensor, anchors: Tensor) -> _Read:
    slots = embedding.num_lookahead
    text, past = read_texts(model, ids[None])
    parts = []
    for some in anchors.split(_ANCHORS):
        # A copy: slot_rows adds the slots' keys.
        parts.append(slot_rows(model, embedding, some[None], deepcopy(past))[0].flatten(0, 1))
    place = (anchors[:, None] + 1 + torch.arange(slots, device=ids.device)).flatten()
    return _Read(ids, torch.cat(parts), text[0], place)


def _hits(model: Any, embedding: LookaheadEmbedding, read: _Read, *, recalls: bool) -> SlotHits:
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    (ids, hidden, text, place), slots = read, embedding.num_lookahead
    ranks, overlaps = torch.empty_like(place), torch.empty(len(place), device=ids.device)
    for picked in torch.arange(len(place), device=ids.device).split(chunk_rows(head.weight)):
        logits = head(hidden[picked]).float()
        if embedding.rank:
            logits += (transition_hidden(embedding, table, ids[place[picked]]) @ table.T).float()
        if recalls:
            _add_recall(logits, ids, place[picked])
        ranks[picked] = ranks_among(logits, ids[place[picked] + 1])
        law = head(text[place[picked]]).float().softmax(-1)
        overlaps[picked] = torch.minimum(law, logits.softmax(-1)).sum(-1)
    return SlotHits(ranks.unflatten(0, (-1, slots)), overlaps.unflatten(0, (-1, slots)))


def _add_recall(logits: Tensor, ids: Tensor, places: Tensor) -> None:
    """Raises the logits ``[n, V]`` of what comes after these places of a text."""
    tokens = torch.tensor(list(dict.fromkeys(reversed(ids.tolist())))[:MAX_RECALL_ROW], device=ids.device)
    back = places[:, None] - torch.arange(RECALL_TOKENS - 1, -1, -1, device=ids.device)
    contexts = ids[back.clamp(min=0)].where(back >= 0, -1)
    texts = torch.arange(len(places), dtype=torch.int32, device=ids.device)
    rows = tokens.expand(len(places), -1).contiguous()
    scores = recall_scores(rows, contexts, texts, ids.expand(len(places), -1).contiguous(), places + 1)
    logits.index_add_(1, tokens, scores)


class _TextHits(NamedTuple):
    """What one text gives; ``hits`` is None if it is too short."""

    kind: str
    temperature: float
    hits: SlotHits | None
    recalled: Tensor | None
    """Ranks with what the text recalls."""


@torch.no_grad()
def _text_hits(model: Any, embedding: LookaheadEmbedding, sample: Sample, anchors: int) -> _TextHits:
    # The first place has the last token of the prompt as its new root.
    first, after = max(sample.prompt_tokens - 2, 0), len(sample.ids) - 1 - embedding.num_lookahead
    if first >= after:
        return _TextHits(sample.kind, sample.temperature, None, None)
    device = model.get_input_embeddings().weight.device
    even, ids = even_places(torch.arange(first, after), anchors).to(device), torch.tensor(sample.ids, device=device)
    read = _read(model, embedding, ids, even)
    hits = SlotHits(*(part.cpu() for part in _hits(model, embedding, read, recalls=False)))
    recalled = _hits(model, embedding, read, recalls=True).ranks.cpu()
    return _TextHits(sample.kind, sample.temperature, hits, recalled)


def evaluate(
    model: Any, embedding: LookaheadEmbedding, samples: Iterable[Sample], anchors: int, world: Ranks | None = None
) -> dict[str, Any]:
    """Hit rates and accepted lengths over all samples and by kind, at ``anchors`` even places a sample at most. Of several
    ranks each gives its share of the samples, and gets the numbers of all.

    Hit rates, which drafts are planned by, are counted with what the text recalls, as ``PaSS`` drafts. All else tells of the
    slots themselves.
    """
    hits_by_kind: dict[str, list[SlotHits]] = {}
    recalled: list[Tensor] = []
    greedy: list[Tensor] = []
    temperatures = set()
    for text in (world or Ranks()).joined([_text_hits(model, embedding, sample, anchors) for sample in samples]):
        temperatures.add(text.temperature)
        if text.hits is not None and text.recalled is not None:
            hits_by_kind.setdefault(text.kind, []).append(text.hits)
            recalled.append(text.recalled)
            if text.temperature == 0:
                greedy.append(text.recalled)
    if not hits_by_kind:
        return {"places": 0}
    by_kind = {kind: torch.cat([hits.ranks for hits in parts]) for kind, parts in sorted(hits_by_kind.items())}
    ranks = torch.cat(list(by_kind.values()))
    overlaps = torch.cat([hits.overlaps for parts in hits_by_kind.values() for hits in parts])
    rates = hit_rates(ranks)
    return {
        "places": len(ranks),
        "texts": sum(map(len, hits_by_kind.values())),
        "temperatures": sorted(temperatures),
        "hit_rates": hit_rates(torch.cat(recalled)),
        **(
            {"greedy_hit_rates": hit_rates(torch.cat(greedy)), "greedy_places": sum(map(len, greedy))} if greedy else {}
        ),
        "slots": top_rates(ranks),
        "overlap": [round(share, 4) for share in overlaps.mean(0).tolist()],
        "accepted": accepted_lengths(ranks, rates),
        "accepted_by_kind": {kind: accepted_lengths(kind_ranks, rates) for kind, kind_ranks in by_kind.items()},
        "places_by_kind": {kind: len(kind_ranks) for kind, kind_ranks in by_kind.items()},
    }

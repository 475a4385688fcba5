"""The held-out evaluation of a head: tokens of each call of the model, decoding the prompts of held-out samples greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pass_ext.decoding.generation import generate
from pass_ext.decoding.methods import Eagle3
from pass_ext.training.common.own_texts import Sample

LENGTH, NEW_TOKENS = 4, 96


def evaluate_head(model: Any, head: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    """By kind of text, and of all: tokens, calls, and tokens a call of chains of 4 drafts."""
    counts: dict[str, list[int]] = {}
    for sample in samples:
        prompt = torch.tensor([sample.ids[: sample.prompt_tokens]], device=model.get_input_embeddings().weight.device)
        if prompt.shape[1] < 2:
            continue
        stats = generate(model, prompt, Eagle3(head, LENGTH), max_new_tokens=NEW_TOKENS).stats
        tokens, calls, texts = counts.setdefault(sample.kind, [0, 0, 0])
        counts[sample.kind] = [tokens + stats.tokens, calls + stats.model_calls, texts + 1]
    if not counts:
        return {"places": 0}
    tokens, calls, texts = (sum(each) for each in zip(*counts.values(), strict=True))
    return {
        "places": tokens,
        "texts": texts,
        "temperatures": [0.0],
        "length": LENGTH,
        "tokens_per_call": round(tokens / calls, 3),
        "by_kind": {kind: round(t / c, 3) for kind, (t, c, _) in sorted(counts.items())},
        "texts_by_kind": {kind: n for kind, (_, _, n) in sorted(counts.items())},
    }

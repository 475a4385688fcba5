"""Batched sampling from the model itself: the texts that self-distillation trains on.

token ~ softmax(logits / T), or the arg-max at T = 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pass_ext.decoding.generation import generate


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    stop: frozenset[int],
) -> list[list[int]]:
    """The model's continuation of each prompt: at most ``new_tokens``, up to and including the first token of ``stop``."""
    longest = max(map(len, prompts))
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    texts = generate(
        model,
        ids,
        max_new_tokens=new_tokens,
        attention_mask=mask,
        temperature=temperature,
        seeds=generator,
        eos_token_id=sorted(stop),
        generation_config=_without_processors(),
    )
    rows = zip(texts.sequences.tolist(), texts.lengths, strict=True)
    return [row[longest : longest + length] for row, length in rows]


def _without_processors() -> Any:
    from transformers import GenerationConfig

    return GenerationConfig()  # the texts are the model's own law, whatever penalties its folder asks for

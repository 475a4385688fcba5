"""``config_processor``: the logits processors that a generation_config asks for, as transformers' greedy search runs them.

transformers builds them itself (``_get_logits_processor``), so penalties, bans, minimal lengths and forced tokens are its own
code. They get each text with its padding on the left. Temperature, top-k and the like are left out: ``generate`` has arguments
for them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch

from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.requests.node_processor import NodeProcessor
from pass_ext.decoding.requests.prompts import Prompts

# Other values of these options change the text in ways that cannot be computed candidate by candidate.
_NEUTRAL = {"guidance_scale": (None, 1), "watermarking_config": (None,)}


def config_processor(
    adapted: Adapted, config: Any, prompts: Prompts, max_new_tokens: int, ends: Collection[int]
) -> NodeProcessor | None:
    """Builds the processors that the config asks for; None if it asks for none.

    Args:
        adapted: a model of transformers that can generate.
        config: a ``GenerationConfig``; not changed.
        ends: tokens that end a text.
    """
    for name, neutral in _NEUTRAL.items():
        if getattr(config, name, None) not in neutral:
            raise ValueError(
                f"generate: generation_config: {name} must be {' or '.join(map(str, reversed(neutral)))} (it is not "
                f"implemented), got {getattr(config, name)}; give generate a generation_config without it"
            )
    device = adapted.table.device
    ids = [[*padding, *text] for padding, text in zip(prompts.padding, prompts.texts, strict=True)]
    mask = [[0] * len(padding) + [1] * len(text) for padding, text in zip(prompts.padding, prompts.texts, strict=True)]
    columns = len(ids[0])
    greedy = copy.deepcopy(config)
    greedy.do_sample = False
    greedy.renormalize_logits = None  # changes neither the arg-max nor the softmax
    greedy.max_length = columns + max_new_tokens
    if greedy.min_new_tokens is not None:
        greedy.min_length = columns + greedy.min_new_tokens
    greedy._eos_token_tensor = torch.tensor(sorted(ends), device=device) if ends else None
    if not ends:
        greedy.exponential_decay_length_penalty = None  # it raises the logits of the end tokens: there are none
    processors = adapted.model._get_logits_processor(
        generation_config=greedy,
        input_ids_seq_length=columns,
        encoder_input_ids=torch.tensor(ids, device=device),
        logits_processor=[],
        device=device,
        model_kwargs={"attention_mask": torch.tensor(mask, device=device)},
    )
    return NodeProcessor(processors, prompts.padding) if processors else None

"""Batched sampling from the model itself: the texts that self-distillation trains on.

token ~ softmax(logits / T), or the arg-max at T = 0. K/V buffers are written in place, finished rows leave the batch. A plain
loop: these batches are long and their rows alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
    mask = torch.cat([mask, mask.new_ones(len(prompts), new_tokens)], dim=1)
    cache = _roomy_cache(model.config.get_text_config().num_hidden_layers, longest + new_tokens)
    written: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    padded = any(len(p) != longest for p in prompts)
    with torch.no_grad():
        for step in range(new_tokens):
            seen = mask[:, : longest + step]
            logits = model(
                input_ids=ids,
                past_key_values=cache,
                attention_mask=seen if padded else None,
                position_ids=(seen.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                logits_to_keep=1,
            ).logits[:, -1]
            chosen = _choose(logits, temperature, generator)
            for row, token in zip(active, chosen.tolist(), strict=True):
                written[row].append(token)
            going = [place for place, row in enumerate(active) if written[row][-1] not in stop]
            if not going:
                break
            if len(going) < len(active):
                remaining = torch.tensor(going, device=device)
                chosen, mask = chosen[remaining], mask[remaining]
                active = [active[place] for place in going]
                for layer in cache.layers:
                    layer.keep(remaining)
            ids = chosen[:, None]
    return written


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token a row; by inverting the distribution function, which is much quicker than ``multinomial`` here."""
    if temperature == 0:
        return logits.argmax(-1)
    below = torch.softmax(logits.float() / temperature, dim=-1).cumsum(-1)
    coin = torch.rand(len(logits), 1, generator=generator).to(logits.device) * below[:, -1:]
    return torch.searchsorted(below, coin, right=True)[:, 0].clamp(max=logits.shape[1] - 1)


def _roomy_cache(layers: int, room: int) -> Any:
    """A transformers cache whose layers write in place: a DynamicCache copies all it holds at every step."""
    from transformers.cache_utils import Cache, DynamicLayer

    class RoomyLayer(DynamicLayer):
        rooms: tuple[Tensor, Tensor]
        filled = 0

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                batch, heads, _count, width = key_states.shape
                keys, values = (key_states.new_empty(batch, heads, room, width) for _ in range(2))
                self.rooms, self.is_initialized = (keys, values), True
            start, self.filled = self.filled, self.filled + key_states.shape[2]
            for whole, new in zip(self.rooms, (key_states, value_states), strict=True):
                whole[:, :, start : self.filled] = new
            return self._show()

        def keep(self, rows: Tensor) -> None:
            self.rooms = self.rooms[0][rows], self.rooms[1][rows]
            self._show()

        def _show(self) -> tuple[Tensor, Tensor]:
            self.keys, self.values = keys, values = tuple(whole[:, :, : self.filled] for whole in self.rooms)
            return keys, values

    return Cache(layers=[RoomyLayer() for _ in range(layers)])

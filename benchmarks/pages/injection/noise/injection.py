"""``NoiseInjection``: adds to the input rows of look-ahead slots a linear function of the uniform number that draws the token
before the one they predict.

    row of slot i behind anchor a  <-  row + features(u) W[i]        u draws the token at a + 1 + i, where the slot stands

W is zero before training. A text's numbers come from their law given the text (uniforms.py), at the temperature that it was
sampled at; text and seed decide them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pages.injection.noise.uniforms import FEATURES, distribution_function, features, posterior_uniforms
from pass_ext.training.common.loss import CHUNK


class NoiseInjection(nn.Module):
    """``weight`` [L, FEATURES, d]."""

    def __init__(self, slots: int, dim: int, temperature: float, seed: int) -> None:
        super().__init__()
        self.temperature, self.seed = temperature, seed
        self.weight = nn.Parameter(torch.zeros(slots, FEATURES, dim))

    def term(self, u: Tensor) -> Tensor:
        """fp32 ``[B, A * L, d]`` that the rows of A groups get, told ``u`` [B, A * L]."""
        told = features(u).unflatten(1, (-1, len(self.weight)))
        return torch.einsum("balf,lfd->bald", told, self.weight.float()).flatten(1, 2)

    @torch.no_grad()
    def uniforms(self, head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
        """u ``[T]`` of a text ``ids`` [T] with last hidden states [T, d]; the first token, which nothing draws, has 0."""
        digest = hashlib.sha256(f"{self.seed} {ids.tolist()}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        parts = [torch.zeros(1, dtype=torch.float64, device=ids.device)]
        for rows, drawn in zip(hidden[:-1].split(CHUNK), ids[1:].split(CHUNK), strict=True):
            sums = distribution_function(head(rows), self.temperature)
            parts.append(posterior_uniforms(sums, drawn, generator))
        return torch.cat(parts)

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Inside, a forward of ids is text, whose numbers stay for the forwards of slots behind it."""
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        told: list[Tensor] = []

        def read(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
            if (ids := named.get("input_ids")) is not None:
                told[:] = [torch.stack([self.uniforms(head, *text) for text in zip(result[0], ids, strict=True)])]

        def add(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if (rows := named.get("inputs_embeds")) is None:
                return None
            term = self.term(told[0].gather(1, named["position_ids"]))
            return inputs, {**named, "inputs_embeds": rows + term.to(rows.dtype)}

        hooks = [
            decoder.register_forward_hook(read, with_kwargs=True),
            decoder.register_forward_pre_hook(add, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

"""Learned keys and values in training: where they begin, and how a model's attention sees them.

    keys of layer l = [text, P learned, groups]    the mask opens the learned ones to every row of a group

They are a part of the past, which no row of the text attends to: the texts are read before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pass_ext.training.common.frozen_model import text_rows

_NOISE = 0.3  # of the deviation of a number among the text's keys


def fresh_prefix(model: Any, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``[layers, P, KV heads, D]``: the mean of the keys, and of the values, that a model has of texts ``[B, T]``, ``count``
    times, with a little noise that lets them part, from torch's default generator.

    A mean is far from what any row looks for, so that slots trained without a prefix go on nearly as they were. The first token
    is left out: many models attend to it whatever the text.
    """
    _, past = text_rows(model, ids)
    return _around_mean([layer.keys for layer in past.layers], count), _around_mean(
        [layer.values for layer in past.layers], count
    )


def _around_mean(layers: list[Tensor], count: int) -> Tensor:
    """``[B, KV heads, T, D]`` by layer -> ``[layers, P, KV heads, D]``."""
    if len({x.shape for x in layers}) != 1:
        shapes = sorted({tuple(x.shape[1:]) for x in layers})
        raise SystemExit(
            f"--prefix-keys needs a model whose layers keep like keys, got (KV heads, texts' tokens, D) {shapes}"
        )
    rows = torch.stack(layers)[:, :, :, 1:].transpose(2, 3).flatten(1, 2).float()  # [layers, B (T - 1), KV heads, D]
    noise = torch.randn(len(rows), count, *rows.shape[2:]).to(rows.device)
    return rows.mean(1, keepdim=True) + _NOISE * rows.std(1, keepdim=True, correction=0) * noise


def put_behind_text(past: Any, prefix: tuple[Tensor, Tensor]) -> None:
    """Puts the learned keys and values behind those of the texts ``[B, KV heads, T, D]`` in every layer; differentiable in
    them. ``past`` is a transformers cache."""
    for layer, keys, values in zip(past.layers, *prefix, strict=True):
        # Not by the layer's `update`: a sliding window would drop text for rows that have no position.
        layer.keys = torch.cat([layer.keys, _for_batch(keys, layer.keys)], dim=2)
        layer.values = torch.cat([layer.values, _for_batch(values, layer.values)], dim=2)


def _for_batch(learned: Tensor, like: Tensor) -> Tensor:
    """``[P, KV heads, D]`` -> ``[B, KV heads, P, D]``."""
    return learned.transpose(0, 1).to(like.dtype).expand(len(like), -1, -1, -1)

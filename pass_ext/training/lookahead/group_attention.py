"""Attention of groups of slots on a CPU: each row sees the text up to its anchor, and its own group up to itself.

    softmax([q K_text, q K_group]) [V_text, V_group]

A text's keys need no gradient, and a row has L others beside the text. PyTorch's attention with a mask computes and
differentiates every pair of rows. Products and sums are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.row_attention import unsupported

KEY = "pass_ext_groups"
_GROUPS = 16  # whose rows are computed together
_groups: ContextVar[tuple[Tensor, int]] = ContextVar("groups")  # of the call: anchors [B, A], and slots of a group


@contextmanager
def attends_in_groups(decoder: Any, anchors: Tensor, slots: int) -> Iterator[None]:
    """Inside, the decoder's layers that attend by "sdpa" do so in groups of slots after ``anchors`` [B, A], on a CPU."""
    config = decoder.config
    if config._attn_implementation != "sdpa" or not anchors.is_cpu:
        yield
        return
    _register()
    token, config._attn_implementation = _groups.set((anchors, slots)), KEY
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
        _groups.reset(token)


@lru_cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(KEY, _attention)
    AttentionMaskInterface.register(KEY, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions: ``[B, heads, R, D]`` -> ``[B, R, heads, D]``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    anchors, slots = _groups.get()
    rows, differs = query.shape[2], any(others.get(name) for name in ("sliding_window", "softcap"))
    if differs or others.get("s_aux") is not None or unsupported(module, rows, dropout, others) is not None:
        how = dict(dropout=dropout, scaling=scaling, **others)
        found: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **how)
        return found
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return group_attention(query, key, value, anchors, slots, scale).transpose(1, 2), None


def group_attention(q: Tensor, k: Tensor, v: Tensor, anchors: Tensor, slots: int, scale: float) -> Tensor:
    """``[B, H, A * L, D]`` of queries of this shape; keys and values ``[B, Hk, T + A * L, D]``, those of the text first."""
    shared, length = k.shape[1], k.shape[2] - q.shape[2]
    text_k, text_v = (x[:, :, :length].detach().float() for x in (k, v))
    own_k, own_v = (x[:, :, None, length:].float().unflatten(3, (-1, slots)) for x in (k, v))  # [B, Hk, 1, A, L, D]
    queries = (q.float() * scale).unflatten(1, (shared, -1)).unflatten(3, (-1, slots))  # [B, Hk, G, A, L, D]
    parts = []
    for first in range(0, anchors.shape[1], _GROUPS):  # anchors rise, so most parts see less than the text
        some = slice(first, first + _GROUPS)
        most = int(anchors[:, some].max()) + 1
        text, group = (text_k[:, :, :most], text_v[:, :, :most]), (own_k[:, :, :, some], own_v[:, :, :, some])
        parts.append(_part(queries[:, :, :, some], text, group, anchors[:, some]))
    return torch.cat(parts, 3).flatten(3, 4).flatten(1, 2).to(q.dtype)


def _part(q: Tensor, text: tuple[Tensor, Tensor], group: tuple[Tensor, Tensor], anchors: Tensor) -> Tensor:
    """Attention to the keys and values of the text and of each group."""
    (text_k, text_v), (own_k, own_v) = text, group
    slots, length = q.shape[4], text_k.shape[2]
    hidden = torch.arange(length) > anchors[..., None, None]  # [B, A, 1, T]
    of_text = (q.flatten(2, 4) @ text_k.mT).view(*q.shape[:-1], length)
    of_text = of_text + torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
    of_group = q @ own_k.mT + torch.full((slots, slots), -torch.inf).triu(1)
    to_text, to_group = torch.cat([of_text, of_group], -1).softmax(-1).split([length, slots], -1)
    return (to_text.flatten(2, 4) @ text_v).view(q.shape) + to_group @ own_v

"""The two forwards of a training step: the texts once, then the look-ahead groups of many anchors at once.

Anchor a is a text index; its group is L rows at positions a + 1 + i that see the text up to a and the group's rows up to
their own. Slot i predicts the token at a + 2 + i, as the ordinary row at a + 1 + i does: that row is its teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.parts import cache_name
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.training.lookahead.adapters import adapters_in_training


def group_mask(anchors: Tensor, length: int, slots: int, dtype: torch.dtype) -> Tensor:
    """The additive mask ``[B, 1, A * L, T + A * L]`` of anchors ``[B, A]``."""
    batch, count = anchors.shape
    text = torch.arange(length, device=anchors.device) <= anchors.repeat_interleave(slots, dim=1)[..., None]
    row = torch.arange(count * slots, device=anchors.device)
    own = (row[:, None] // slots == row // slots) & (row[:, None] >= row)
    allowed = torch.cat([text, own.expand(batch, -1, -1)], dim=2)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=anchors.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def slot_rows(
    model: Any, embedding: LookaheadEmbedding, anchors: Tensor, past: Any, slots: int | None = None
) -> Tensor:
    """Last hidden states ``[B, A, L, d]`` of the slots behind ``anchors`` [B, A]; ``past`` holds the texts and grows.

    slots: the first so many slots; None: all.
    """
    table, slots = model.get_input_embeddings().weight, slots or embedding.num_lookahead
    batch, count = anchors.shape
    length, decoder = past.get_seq_length(), model.get_decoder()
    ids = (-1 - torch.arange(slots, device=anchors.device)).repeat(batch, count)
    positions = anchors[..., None] + 1 + torch.arange(slots, device=anchors.device)
    offsets: Sequence[Tensor] = ()
    if embedding.deep is not None:
        # A tensor by layer: the gradient of an index into one tensor of all layers is as large as that tensor.
        offsets = embedding.deep[:, :slots].to(table.dtype).repeat(1, count, 1).unbind()
    with adapters_in_training(model, embedding.adapters, ids, offsets):
        hidden = decoder(
            inputs_embeds=embedding(ids, table),
            position_ids=positions.flatten(1),
            attention_mask=group_mask(anchors, length, slots, table.dtype),
            use_cache=True,
            **{cache_name(decoder.forward): past},
        ).last_hidden_state
    return hidden.unflatten(1, (count, slots))


def transition_hidden(embedding: LookaheadEmbedding, table: Tensor, previous: Tensor) -> Tensor:
    """``(E[previous] @ left) @ right^T`` ``[..., d]``: its product with a candidate's embedding is the transition score.

    Computed in the parameters' type, given in the table's.
    """
    if embedding.transition_left is None or embedding.transition_right is None:
        raise ValueError("these look-ahead embeddings have no transition score (their rank is 0)")
    known = table[previous].to(embedding.transition_left.dtype)
    return ((known @ embedding.transition_left) @ embedding.transition_right.T).to(table.dtype)

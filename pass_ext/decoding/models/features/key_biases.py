"""``KeyBias``: a bias of a head's logits by the position of the key (ALiBi), as columns after queries and keys.

    scale * (q . k) + slope * position of k  =  scale * ([q, c, ...] . [k, b_1, ...])

    c           the power of two from 1 / scale on
    b_1 + ...   slope * position / (scale * c), in as many columns as the dtype needs for 24 bits

A softmax does not change where all its logits get the same, so the distance from row to key need not be known.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.parts import decoder_of


class KeyBias(NamedTuple):
    """The bias of one layer."""

    slopes: Tensor
    """``[heads]`` float32."""
    scale: float
    """Factor of the layer's products."""
    dtype: torch.dtype
    """The model rounds slope * position to it."""

    def columns(self, dtype: torch.dtype) -> int:
        """How many numbers of this dtype lie after a key."""
        return 1 if dtype == torch.float32 else 3

    def queries(self, q: Tensor) -> Tensor:
        """``[..., heads, D]`` with their columns."""
        return torch.cat((q, q.new_full((*q.shape[:-1], self.columns(q.dtype)), self._factor())), -1)

    def keys(self, k: Tensor, positions: Tensor) -> Tensor:
        """``[..., heads, D]`` at positions ``[...]``, with their columns."""
        rest = (positions[..., None] * self.slopes).to(self.dtype).float() / (self.scale * self._factor())
        parts = []
        for _ in range(self.columns(k.dtype)):
            parts.append(rest.to(k.dtype))
            rest = rest - parts[-1].float()
        return torch.cat((k, torch.stack(parts, -1).expand(*k.shape[:-1], -1)), -1)

    def _factor(self) -> float:
        return float(2.0 ** math.ceil(-math.log2(self.scale)))


def key_biases(model: Any) -> dict[int, KeyBias]:
    """Those of the layers of a model that have one, by their number."""
    decoder, found = decoder_of(model), dict[int, KeyBias]()
    for part in modules_of(model):
        kind = type(part).__name__
        if kind == "BloomAttention":
            like = part.dense.weight
            ones = torch.ones(1, 2, dtype=torch.long, device=like.device)
            slopes = decoder.build_alibi_tensor(ones, part.num_heads, torch.float32)[:, 0, 1]
            found[part.layer_idx] = KeyBias(slopes, part.inv_norm_factor, like.dtype)
        elif kind == "MptAttention":
            slopes = -decoder.build_mpt_alibi_tensor(part.n_heads, 2, device=part.out_proj.weight.device)[:, 0, 0]
            found[part.layer_idx] = KeyBias(slopes, part.softmax_scale, torch.float32)
    return found


def without_columns(keys: Tensor, bias: KeyBias | None) -> Tensor:
    """Keys without the columns of this bias."""
    return keys if bias is None else keys[..., : keys.shape[-1] - bias.columns(keys.dtype)]

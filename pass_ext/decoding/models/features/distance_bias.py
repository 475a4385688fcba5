"""``DistanceBias``: attention whose logits get a bias by the distance from row to key, by calls of ``attention_tree``.

    logit of a key = scale * (q . k) + bias[distance], without bias from ``bias.shape[-1]`` on

The ops have no such bias. So the nearest keys get a one-hot code of their position after them, of its rest by ``_STEP``; and
a query the biases of ``_STEP`` distances, over the scale and in the order of these rests: their product is the bias. Each call
has the keys of that many distances, by lists, and one more the farther keys, without codes. ``attention_merge`` joins them.

What a call adds up follows from a row and its own text alone, so a row has the same bits whatever else a step has. The host
reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pass_ext.ops.attention import WIDTH_STEP, attention_merge
from pass_ext.ops.quantize import dequantize_rows
from pass_ext.tree import PackedTrees

# Distances of a call. Keys of 128 numbers then have 192, with values of 128: widths of csrc/cuda/attention_group.cuh, which has
# fragments and takes lists, from 8 query heads per key head on and in 16 bits. Fewer heads take the kernel without fragments.
_STEP = 64


class DistanceBias:
    """The lists of a step's rows, for biases of ``count`` distances.

    Args:
        prefix_lens: ``[B]``.
        room: positions of the caches.
        window: as ``attention_tree`` takes it.
    """

    def __init__(self, trees: PackedTrees, prefix_lens: Tensor, room: int, count: int, window: int) -> None:
        depths = trees.depths.long()
        self._count, self._step = count, min(_STEP, -(-count // WIDTH_STEP) * WIDTH_STEP)
        self._lens = prefix_lens.long()
        self._sees = trees.seen()
        self._distances = depths[:, None] - depths[trees.rows_of_nodes[trees.owners]]
        self._depths, self._prefixes = depths, self._lens[trees.owners]
        self._positions = self._prefixes + depths
        self._near = self._near_lists(count if window < 0 else min(count, window))
        self._far = None if 0 <= window <= count else self._far_list(room)

    def _near_lists(self, seen: int) -> list[Tensor]:
        """The keys of each ``_step`` distances, of which key ``count - i`` is i tokens before the root, key ``count + j`` node
        j."""
        count, nodes = self._count, torch.arange(self._sees.shape[1], device=self._sees.device)
        keys = count + self._depths[:, None] - torch.arange(count + 1, device=nodes.device)  # before the root
        columns = self._distances.where(self._sees & (self._distances < count), count)  # the last one is nobody's
        keys.scatter_(1, columns, (count + nodes).expand_as(columns))
        lists = []
        for first in range(0, seen, self._step):
            farthest = self._positions.clamp(max=min(first + self._step, seen) - 1)[:, None]
            distances = farthest - torch.arange(self._step, device=nodes.device)
            lists.append(keys.gather(1, distances.clamp(min=0)).masked_fill(distances < first, -1).int())
        return lists

    def _far_list(self, room: int) -> Tensor:
        """The keys from ``count`` distances on."""
        nodes = torch.arange(self._sees.shape[1], device=self._sees.device)
        slots = torch.arange(room + len(nodes) + 1, dtype=torch.int32, device=nodes.device)
        before = (self._positions - self._count + 1).clamp(min=0).minimum(self._prefixes)[:, None]
        keys = slots.where(slots < before, -1)
        is_far = self._sees & (self._distances >= self._count)
        columns = (before + is_far.cumsum(1) - 1).where(is_far, len(slots) - 1)  # the last one is nobody's
        return keys.scatter_(1, columns, (self._prefixes[:, None] + nodes).where(is_far, -1).int())

    def attend(
        self,
        attention: Callable[..., tuple[Tensor, Tensor]],
        q: Tensor,
        bias: Tensor,
        caches: tuple[Tensor, Tensor],
        new: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """``[N, heads, Dv]``.

        Args:
            attention: ``attention_tree`` of the step, for q, keys and values, those of the rows, and by name key_lists,
                prefix_lens and window.
            bias: ``[N, heads, count]``.
            caches, new: keys and values in the caches and of the rows, numbers or codes.
        """
        slots = self._lens[:, None] - self._count + torch.arange(self._count, device=q.device)
        at = slots.clamp(min=0, max=max(caches[0].shape[1] - 1, 0))
        requests = torch.arange(len(at), device=q.device)[:, None]
        (near_k, near_v), (k, v) = (
            [x if x.dtype is q.dtype else dequantize_rows(x, q.dtype) for x in pair]
            for pair in ([cache[requests, at] for cache in caches], new)
        )
        near_k, k = self._coded(near_k, slots), self._coded(k, self._positions)
        rests = (self._positions[:, None] - torch.arange(self._step, device=q.device)) % self._step
        lens = torch.full_like(self._lens, self._count)
        out = lse = None
        if self._far is not None:
            out, lse = attention(q, *caches, *new, key_lists=self._far)
            out = out.float()
        for number, lists in reversed(list(enumerate(self._near))):
            some = bias[..., number * self._step :][..., : self._step].float() / scale
            some = functional.pad(some, (0, self._step - some.shape[-1])).to(q.dtype)
            codes = some.gather(2, rests[:, None].expand(some.shape))
            part, part_lse = attention(
                torch.cat((q, codes), -1), near_k, near_v, k, v, key_lists=lists, prefix_lens=lens, window=-1
            )
            part = part.float()
            out, lse = (part, part_lse) if out is None or lse is None else attention_merge(out, lse, part, part_lse)
        assert out is not None
        return out.to(q.dtype)

    def _coded(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys ``[..., KV heads, D]`` at positions ``[...]``, with the codes of these after them."""
        codes = positions[..., None] % self._step == torch.arange(self._step, device=keys.device)
        codes = codes[..., None, :].to(keys.dtype)
        return torch.cat((keys, codes.expand(*keys.shape[:-1], self._step)), -1)

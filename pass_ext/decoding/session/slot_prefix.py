"""``SlotPrefix``: learned keys and values of every layer, to which rows of look-ahead slots attend beside all that they see.

    out = merge(attention over what the row sees, attention over the learned keys)    rows of slots
    out = attention over what the row sees, bit by bit                                rows of tokens

Learned keys have no position, and no window hides them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.ops.attention import attention_merge, attention_tree
from pass_ext.tree import PackedTrees


class SlotPrefix(NamedTuple):
    """Copies of learned keys and values in the dtype and on the device of a model."""

    keys: Tensor
    """``[layers, P, KV heads, D]``"""
    values: Tensor

    @classmethod
    def of(cls, prefix: tuple[Tensor, Tensor], like: Tensor) -> SlotPrefix:
        """Copies, as ``like``."""
        return cls(*(x.detach().to(like, copy=True).contiguous() for x in prefix))

    def has_shapes_of(self, other: SlotPrefix) -> bool:
        """True if ``copy_`` can take the numbers of the other."""
        return all(mine.shape == theirs.shape for mine, theirs in zip(self, other, strict=True))

    def copy_(self, other: SlotPrefix) -> None:
        """Takes the other's numbers in place: recorded calls read the same memory."""
        for mine, theirs in zip(self, other, strict=True):
            mine.copy_(theirs)

    def of_call(self, ids: Tensor, trees: PackedTrees) -> RowPrefix | None:
        """For the rows of one call, whose ids are ``[N]``; None if none is a slot's, where that can be seen without a
        synchronisation."""
        return None if ids.is_cpu and not bool((ids < 0).any()) else RowPrefix(self, ids, trees)


class RowPrefix:
    """The learned keys and values of one call.

    Args:
        learned: of all layers.
        ids: ``[N]``; negative ones are of rows that attend to them.
        trees: of the call.
    """

    def __init__(self, learned: SlotPrefix, ids: Tensor, trees: PackedTrees) -> None:
        self.learned, self.ids, self._trees = learned, ids, trees
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.learned.keys)

    def has_rows_of(self, layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> bool:
        """True if keys and values are of so many layers, heads and numbers, and of this dtype."""
        sizes = (heads, head_dim)
        return all(len(x) == layers and x.shape[2:] == sizes and x.dtype is dtype for x in self.learned)

    def merged(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dims: tuple[int, int],
        out: Tensor,
        lse: Tensor,
        **options: Any,
    ) -> Tensor:
        """The attention of a layer, ``out [N, heads, D]`` and ``lse [N, heads]``, with the learned keys merged in.

        q, k, v: as ``attention_tree`` took them; k and v ``[N, KV heads, D]`` of their first ``dims`` numbers. options: scale
        and softcap of the layer.
        """
        keys, values = (
            self._of_layer(x, layer, like, dim) for x, like, dim in zip(self.learned, (k, v), dims, strict=True)
        )
        trees, (is_slot, lengths, visible) = self._trees, self._inputs or self._make_inputs()
        few, few_lse = attention_tree(
            q, keys, values, lengths, trees.cu_nodes, visible, trees.max_nodes, k_new=k, v_new=v, **options
        )
        both, _ = attention_merge(out, lse, few, few_lse)
        return torch.where(is_slot, both, out)  # not by an lse of -inf, beside which -0.0 would become 0.0

    def _make_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows are a slot's; lengths and visible nodes, with which the learned keys are the text of every request, and no
        node sees another."""
        trees, length = self._trees, self.learned.keys.shape[1]
        lengths = torch.full((len(trees.cu_nodes) - 1,), length, dtype=torch.int32, device=self.ids.device)
        self._inputs = (self.ids < 0)[:, None, None], lengths, torch.zeros_like(trees.visible)
        return self._inputs

    def _of_layer(self, learned: Tensor, layer: int, like: Tensor, dim: int) -> Tensor:
        """``[B, P, KV heads, D]``, padded as the rows of the call are."""
        there, wanted = list(learned.shape[2:]), [like.shape[1], dim]
        if layer >= len(learned) or there != wanted:
            raise ValueError(
                f"these look-ahead slots have learned keys and values for {len(learned)} layers, {there} each (KV heads, D); "
                f"the model's layer {layer} has {wanted}"
            )
        rows = F.pad(learned[layer], (0, like.shape[-1] - dim)).to(like.dtype)
        return rows.expand(len(self._trees.cu_nodes) - 1, *rows.shape)

"""``FusedLayer``: a decoder layer around its attention by two ops, on the CPU, with the bits of its parts.

    q, k, v = layer_before_attention(normed rows)        out = layer_after_attention(attended, residual)

Rows are few; for the many of a prompt PyTorch's products are faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.module_ops import gate_of, most_few_rows, norm_of
from pass_ext.decoding.models.packed import Attend
from pass_ext.decoding.models.parts import weights_of
from pass_ext.decoding.models.shadow import takes_rows_of_our_call

_before = torch.ops.pass_ext.layer_before_attention.default
_after = torch.ops.pass_ext.layer_after_attention.default
_NO_ADAPTERS: tuple[Any, ...] = (None, [], 0, 1.0)


class FusedLayer:
    """The weights of a layer, as both ops take them."""

    def __init__(self, before: tuple[Any, ...], after: tuple[Any, ...], dim: int, number: int, window: int) -> None:
        self._weights, self._after, self._dim, self._number, self._window = before, after, dim, number, window
        self._dtype = after[3].dtype  # of its norm: weights may be packed
        self._most = most_few_rows(self._dtype, is_cpu=True)

    @classmethod
    def of(cls, attention: Any, mlp: nn.Module, mlp_norm: nn.Module) -> FusedLayer | None:
        """The layer of these parts; None: the ops do not compute it."""
        parts = [(attention, name) for name in "qkvo"] + [(mlp, name) for name in ("gate", "up", "down")]
        products = [weights_of(getattr(part, f"{name}_proj")) for part, name in parts]
        gate, norm = gate_of(mlp), norm_of(mlp_norm)
        if gate is None or norm is None or any(each is None or not each[0].is_cpu for each in products):
            return None
        tensors = [tensor for each in products for tensor in each]  # type: ignore[union-attr]
        heads = [getattr(part, "weight", None) for part in (attention.q_norm, attention.k_norm)]
        options = norm.eps, norm.form
        before = *tensors[:6], *heads, *options
        after = *tensors[6:8], None, norm.weight, *tensors[8:], None, *options, gate.activation, 1.0
        return cls(before, after, attention.dim, attention.layer, attention.window)

    def takes(self, rows: Tensor) -> bool:
        """True for rows ``[N, width]`` that the ops are made for."""
        return (
            rows.is_cpu
            and rows.dtype is self._dtype
            and not torch.is_grad_enabled()
            and takes_rows_of_our_call(len(rows), self._most)
        )

    def __call__(self, normed: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """``[N, d]`` from the rows ``[N, width]`` that go into attention, and those that its output is added to."""
        *weights, eps, form = self._weights
        q, k, v = _before(normed, None, *weights, *rotation, self._dim, eps, form, *_NO_ADAPTERS)
        attended = attend(self._number, q, k, v, window=self._window).flatten(1)
        out: Tensor = _after(attended, residual, *self._after, *_NO_ADAPTERS)
        return out

"""``PackedLinear`` and ``PackedEmbedding``: the layers of a model whose weights have 4 or 8 bits for each number.

    PackedLinear      x -> weight @ x + bias, by ``linear_packed``
    PackedEmbedding   ids -> rows of the weight

A packed weight is a parameter of uint8, so that ``state_dict``, ``to``, copies and pickles have it as any other; dtypes change
around it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.ops import linear, lookahead  # noqa: F401, which register the ops
from pass_ext.weights.form import OUTPUTS, unpack_weight

_linear = torch.ops.pass_ext.linear_packed.default
_embed = torch.ops.pass_ext.lookahead_embed.default


class Packed(nn.Module):
    """A module whose parameters of uint8 are packed weights. A row of what it computes has the bits that it has alone."""


class PackedLinear(Packed):
    """A linear layer with a packed weight, for the CPU.

    Args:
        weight: as ``pack_weight`` makes it, or the parameter of another layer, which both then share.
        out_features: its outputs; the weight has blocks of 16.
        bias: ``[out]``.
        order: ``[in]``: the input that each column of the weight is of; None: its own.

    Gradients reach the input, which a frozen layer beneath trained ones needs, not the weight.
    """

    order: Tensor | None

    def __init__(
        self, weight: Tensor, out_features: int, bias: Tensor | None = None, order: Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.shape[1] * 32, out_features
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("order", order)

    def forward(self, input: Tensor) -> Tensor:
        if self.order is not None:
            input = input.index_select(-1, self.order)
        return product(input, self.weight, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class PackedEmbedding(Packed):
    """A table of embeddings with a packed weight.

    Args:
        weight: as ``pack_weight`` makes it.
        num_embeddings: its rows.
        dtype: of the embeddings that it gives; ``to`` changes it.
        scale: what multiplies them, rounded to their dtype; None: nothing.
    """

    def __init__(self, weight: Tensor, num_embeddings: int, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, weight.shape[1] * 32
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        like: Any = self.like
        rows: Tensor = _embed(input, self.weight, like.view(0, self.embedding_dim))
        return rows if self.scale is None else rows * like.new_full((), self.scale)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def table_of(embedding: Any) -> Tensor:
    """The table ``[V, d]`` of a module of embeddings; of a packed one its shape and dtype, without values."""
    if not isinstance(embedding, PackedEmbedding):
        table: Tensor = embedding.weight
        return table
    like: Any = embedding.like
    return like.new_empty(1, 1).expand(embedding.num_embeddings, embedding.embedding_dim)


def is_whole(layer: PackedLinear) -> bool:
    """True for a layer that its weight alone tells: outputs fill its blocks, and inputs have their own order."""
    return layer.out_features % OUTPUTS == 0 and layer.order is None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``linear_packed`` with the gradient of its input."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Product.apply(x, weight, bias, outputs)
    return _linear(x, weight, bias, outputs)


class _Product(torch.autograd.Function):
    """``linear_packed``, and the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.outputs = outputs
        out: Tensor = _linear(x.detach(), weight, bias, outputs)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ unpack_weight(weight, ctx.outputs).to(gradient.dtype), None, None, None

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

from pass_ext.ops import linear  # noqa: F401, which registers the op
from pass_ext.weights.form import OUTPUTS, unpack_rows, unpack_weight

_linear = torch.ops.pass_ext.linear_packed.default


class PackedLinear(nn.Module):
    """A linear layer with a packed weight, for the CPU.

    Args:
        weight: as ``pack_weight`` makes it, or the parameter of another layer, which both then share.
        out_features: its outputs; the weight has blocks of 16.
        bias: ``[out]``.

    Gradients reach the input, which a frozen layer beneath trained ones needs, not the weight.
    """

    def __init__(self, weight: Tensor, out_features: int, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.shape[1] * 32, out_features
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            return _Product.apply(input, self.weight, self.bias, self.out_features)
        return _linear(input, self.weight, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class PackedEmbedding(nn.Module):
    """A table of embeddings with a packed weight.

    Args:
        weight: as ``pack_weight`` makes it.
        num_embeddings: its rows.
        dtype: of the embeddings that it gives; ``to`` changes it.
    """

    def __init__(self, weight: Tensor, num_embeddings: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, weight.shape[1] * 32
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        like: Any = self.like
        rows = unpack_rows(self.weight, input.flatten())
        return rows.to(like.dtype).view(*input.shape, self.embedding_dim)

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
    """True for a layer whose outputs fill the blocks of its weight."""
    return layer.out_features % OUTPUTS == 0


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

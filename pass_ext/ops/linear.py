"""``linear_rows``: a linear layer for the few rows of a decoding step. ``linear_packed``: with a weight in 4 or 8 bits.

out[r] = weight @ x[r] + bias. Kernels: csrc/cpu/linear.cpp, csrc/cuda/linear.cuh.
"""

import torch
from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.common.arguments import typed
from pass_ext.ops.common.kernels import call, fake_kernel, refuse_gradients

_op = ops.linear_rows.default
_packed_op = ops.linear_packed.default


@typed("pass_ext::", page="ops/layer")
def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` for the few rows of a decoding step, ``[..., in]`` to ``[..., out]``: reads the weight
    once for all rows, on a GPU once for every 16 (in float32 8).

    Args:
        x: ``[..., in]`` bfloat16, float16 or float32.
        weight: ``[out, in]`` in x's dtype; rows may be strided, ``in`` contiguous.
        bias: ``[out]`` in x's dtype.

    Returns:
        ``[..., out]`` in x's dtype; products and sums are fp32, rounded once.

    A row's result has the same bits whatever the other rows are, how many there are, and how many threads compute them (on one
    instruction set, or one kind of GPU). So a token decoded in a batch of drafts gets the numbers of a token decoded alone.

    ``torch.nn.functional.linear`` may be faster for more than 64 rows on a GPU, for large weights there in any case, and for
    more than 128 rows where the processor multiplies the dtype itself. No gradients, reverse or forward: the op raises if an
    input requires one.

    Example:

        >>> x, weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2)
        >>> pass_ext.layers.linear_rows(x, weight, torch.tensor([0.5, 0.0]))
        tensor([[1.5000, 2.0000],
                [3.5000, 4.0000]])
    """
    refuse_gradients("linear_rows", x, weight, bias)
    out: Tensor = call(_op, x, weight, bias)
    return out


def shape_of(weight: Tensor) -> tuple[int, int]:
    """(out, in) of a weight, dense or packed; a packed one's out is a multiple of 16."""
    packs = (16, 32) if weight.dtype is torch.uint8 else (1, 1)
    return weight.shape[0] * packs[0], weight.shape[1] * packs[1]


@fake_kernel("linear_rows")
def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@typed("pass_ext::", page="ops/layer")
def linear_packed(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, outputs: int) -> Tensor:
    """A linear layer whose weight has 4 or 8 bits for each number, ``[..., in]`` to ``[..., out]``: reads the weight once for
    few rows.

    Args:
        x: ``[..., in]`` bfloat16, float16 or float32.
        weight: ``[out / 16, in / 32, bytes]`` uint8 as ``pack_weight`` makes it; contiguous.
        bias: ``[out]`` in x's dtype.
        outputs: out. The weight has blocks of 16, the last of which may have fewer.

    Returns:
        ``[..., out]`` in x's dtype.

    The weight's numbers are those of the codes, exactly. Each 32 numbers of a row of x become whole numbers of 16 bits, within
    1 / 65,024 of the largest among them; their products with codes are added exactly, the rest in fp32, rounded once. A row
    whose block has a number that is not finite gives NaN; a block whose numbers are all below 2^-100 counts as zeros.

    A row's result has the same bits whatever the other rows are, how many there are, how many threads compute them, and on
    every instruction set. So it is for any number of rows, those of prompts too. For the CPU only. No gradients, reverse or
    forward: the op raises if an input requires one.

    Example:

        >>> codes, scale = torch.arange(32, dtype=torch.uint8)[None] % 16, torch.ones(1, 1, dtype=torch.float16)
        >>> weight = pass_ext.layers.pack_weight(codes, scale, -8 * scale, bits=4)  # -8, -7, …, 7, twice
        >>> pass_ext.layers.linear_packed(torch.ones(2, 32), weight, outputs=1)
        tensor([[-16.],
                [-16.]])
    """
    refuse_gradients("linear_packed", x, weight, bias)
    out: Tensor = call(_packed_op, x, weight, bias, outputs)
    return out


@fake_kernel("linear_packed")
def _packed_shape(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))

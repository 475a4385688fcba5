"""``quantize_rows`` and ``dequantize_rows``: rows of keys and values in 8 bits, as ``attention_tree`` reads them.

A row is 16 bytes, of which the first four are a float32 scale and the others 0, and then a code for each number:
csrc/core/quantize.h. Kernels: csrc/cpu/quantize.cpp, csrc/cuda/quantize.cuh.
"""

import torch
from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.common.arguments import typed
from pass_ext.ops.common.kernels import call, fake_kernel, refuse_gradients

CODE_HEADER = 16
"""Bytes in front of the codes of a row: kCodeHeader of csrc/core/quantize.h."""
MOST_OF_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest code of each dtype."""

_op = ops.quantize_rows.default


@typed("pass_ext::", page="ops/attention")
def quantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of keys or values ``[..., D]`` in 8 bits, ``[..., 16 + D]``: one scale for each row, so for each token and head.

    ``attention_tree`` takes such rows for keys and values, in the cache and outside, and ``cache_commit_`` moves them. The
    nodes' own rows are in 8 bits too, so a node sees the numbers that later nodes see, and plain and speculative decoding
    write the same text.

    Args:
        rows: bfloat16, float16 or float32, D at least 1; any strides.
        dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        Contiguous rows in dtype. Their first 16 numbers are bytes of the header: a float32, the largest number of the row by
        its size over the largest code, and zeros. Codes are numbers over this scale, rounded to the nearest, ties to even. A
        row of zeros is zeros; a row with a NaN or infinite number is all NaN.

    The same bits on every device. One launch on CUDA, which can be part of a graph. No gradients, reverse or forward: the op
    raises if rows require one.

    Example:

        >>> rows = pass_ext.layers.quantize_rows(torch.tensor([[1.0, -0.5, 0.25, 0.0]]), torch.int8)
        >>> rows[:, 16:]
        tensor([[127, -64,  32,   0]], dtype=torch.int8)
        >>> pass_ext.layers.dequantize_rows(rows)
        tensor([[ 1.0000, -0.5039,  0.2520,  0.0000]])
    """
    refuse_gradients("quantize_rows", rows)
    stored: Tensor = call(_op, rows, dtype)
    return stored


@fake_kernel("quantize_rows")
def _shape(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], CODE_HEADER + rows.shape[-1]), dtype=dtype)


def dequantize_rows(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers ``[..., D]`` of rows ``[..., 16 + D]`` as ``quantize_rows`` makes them, in dtype."""
    if rows.dtype not in MOST_OF_CODES:
        raise TypeError(f"pass_ext: quantised rows must be {', '.join(map(str, MOST_OF_CODES))}, got {rows.dtype}")
    scale = rows[..., :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., CODE_HEADER:].float() * scale).to(dtype)

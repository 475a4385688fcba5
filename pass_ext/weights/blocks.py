"""Weights in 8-bit floats, or in 4-bit ones of which a byte has two, with a scale for each block of rows and inputs.

    weight[o, i] = number[o, i] scale[o // m, i // n]

    X.weight [out, in] float8, or [out, in / 2] int8      the first of two numbers in the low bits, in the form E2M1
    X.scale, or X.weight_scale_inv                        float32, or a power of two: float8_e8m0fnu, or its exponent in a byte

DeepSeek-V3 and V4, GLM-4.5 and Qwen 3 have such checkpoints, of quant_method "fp8". The weights become dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

_SCALES = ".scale", ".weight_scale_inv"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Read = Callable[[], Tensor]


def without_blocks(tensors: Mapping[str, Read], rows: int, inputs: int) -> dict[str, Read]:
    """The tensors with the numbers of weights in place of weights and scales.

    Args:
        rows, inputs: of a block, as the config says; those at the ends may be smaller. Scales that do not fit it are of equal
            blocks.
    """
    found = dict(tensors)
    for name in tensors:
        layer = next((name.removesuffix(end) for end in _SCALES if name.endswith(end)), None)
        weight = f"{layer}.weight"
        if layer is not None and weight in tensors:
            found[weight] = partial(_numbers, weight, tensors[weight], found.pop(name), (rows, inputs))
    return found


def _numbers(name: str, weight: Read, scale: Read, block: tuple[int, int]) -> Tensor:
    """``[out, in]`` in float32."""
    numbers, scales = weight(), _scales(scale())
    if numbers.dtype in (torch.int8, torch.uint8):
        numbers = _unpacked(numbers)
    sizes = list(numbers.shape)
    if numbers.ndim != 2 or scales.ndim != 2 or not min(scales.shape):
        raise ValueError(f"{name}: a weight {sizes} cannot have scales {list(scales.shape)}")
    if [-(-size // step) for size, step in zip(sizes, block, strict=True)] != list(scales.shape):
        if any(size % count for size, count in zip(sizes, scales.shape, strict=True)):
            raise ValueError(
                f"{name}: a weight {sizes} in blocks of {list(block)}, or equal ones, cannot have scales {list(scales.shape)}"
            )
        block = (sizes[0] // scales.shape[0], sizes[1] // scales.shape[1])
    each = scales.repeat_interleave(block[0], 0)[: sizes[0]].repeat_interleave(block[1], 1)[:, : sizes[1]]
    return numbers.float() * each


def _scales(stored: Tensor) -> Tensor:
    return torch.exp2(stored.float() - 127) if stored.dtype is torch.uint8 else stored.float()


def _unpacked(stored: Tensor) -> Tensor:
    """``[out, 2 n]`` of ``[out, n]``."""
    codes = stored.contiguous().view(torch.uint8)
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)])
    return table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]

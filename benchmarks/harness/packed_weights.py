"""A dense weight as a packed one: ``packed``, in the numbers of Q4_0 or Q8_0, and ``packed_k``, in a form of the K formats."""

import torch
from torch import Tensor

import pass_ext


def packed(weight: Tensor, bits: int, table: Tensor | None = None) -> Tensor:
    """The weight in so many bits, as Q4_0 and Q8_0 round. table: of what codes stand for."""
    most = (1 << bits - 1) - 1
    blocks = weight.unflatten(1, (-1, 32))
    scale = (blocks.abs().amax(-1) / most).half()
    codes = (blocks / scale[..., None].float()).round().clamp(-most, most) + (most + 1)
    codes = codes.to(torch.uint8).flatten(1)
    return pass_ext.layers.pack_weight(codes, scale, -(most + 1) * scale, bits=bits, table=table)


def packed_k(weight: Tensor, bits: int, inputs: int) -> Tensor:
    """The weight in so many bits, with a factor for each so many inputs: 32 as Q4_K and Q5_K, 16 as Q6_K."""
    middle = 1 << bits - 1
    blocks = weight.unflatten(1, (-1, 256 // inputs, inputs))
    largest = blocks.abs().amax(-1)
    scale = (largest.amax(-1) / (127 * (middle - 1))).half()
    factors = (largest / (scale[..., None].float() * (middle - 1))).ceil().clamp(1, 127)
    codes = (blocks / (scale[..., None].float() * factors)[..., None]).round().clamp(1 - middle, middle - 1) + middle
    both = factors.flatten(1).to(torch.int8).expand(2, -1, -1)
    return pass_ext.layers.pack_weight(
        codes.to(torch.uint8).flatten(1), scale, -middle * scale, bits=bits, factors=both
    )

"""``packed``: a dense weight as a packed one, in the numbers of Q4_0 or Q8_0."""

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

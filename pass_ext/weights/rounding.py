"""``rounded``: a dense weight in 4 or 8 bits, packed.

weight[o, i] ≈ scale code[o, i] + least,  scale = (most - least) / (2^bits - 1) of each 32 inputs, both float16
"""

from __future__ import annotations

from torch import Tensor

from pass_ext.weights.form import INPUTS, pack_weight

_SMALLEST = 2.0**-24  # of float16; a group of equal numbers has scale 0


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The weight ``[out, in]``, in a multiple of 32, as ``linear_packed`` takes it."""
    groups, top = weight.float().unflatten(1, (-1, INPUTS)), (1 << bits) - 1
    least, most = groups.amin(-1), groups.amax(-1)
    scale, offset = ((most - least) / top).half(), least.half()
    codes = (groups - offset.float()[..., None]) / scale.float().clamp(min=_SMALLEST)[..., None]
    return pack_weight(codes.round().clamp(0, top).byte().flatten(1), scale, offset, bits=bits)

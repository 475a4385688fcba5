"""The quantised formats of GGUF files as packed weights (``form.py``): ``pack_gguf``.

A row of a GGUF tensor is blocks of 32 or 256 numbers. All these formats are codes times a scale plus an offset, per 32 numbers
or per 16; they differ in how a block stores them. What a file has as a product of two numbers (the K formats) is that
product in float32, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.weights.form import pack_weight


class Parts(NamedTuple):
    """Codes ``[rows, blocks, numbers]``, and scale and offset ``[rows, blocks, parts]`` of one tensor."""

    codes: Tensor
    scale: Tensor
    offset: Tensor


def pack_gguf(name: str, stored: Tensor) -> Tensor:
    """A GGUF tensor ``[out, bytes of a row]`` uint8 of the format called so, packed.

    ValueError for a format that is not read, a row that is no whole number of blocks, and scales that are no finite numbers.
    """
    if name not in FORMATS:
        raise ValueError(f"the format {name} is not read as it is; {', '.join(FORMATS)} are")
    size, bits, parts_of = FORMATS[name]
    if stored.shape[1] % size:
        raise ValueError(f"a row of {name} must have a multiple of {size} bytes, got {stored.shape[1]}")
    codes, scale, offset = parts_of(stored.view(len(stored), -1, size))
    if not (scale.isfinite().all() and offset.isfinite().all()):
        raise ValueError(f"the scales of {name} must be finite numbers of their type, got others")
    flat = (part.reshape(len(stored), -1) for part in (codes, scale, offset))
    return pack_weight(*flat, bits=bits)


# ---- blocks of 32 ----


def _halves(blocks: Tensor, start: int, stop: int) -> Tensor:
    return blocks[..., start:stop].contiguous().view(torch.float16)


def _nibbles(stored: Tensor) -> Tensor:
    """The lower four bits of all bytes, and then the upper four."""
    codes = stored.new_empty(*stored.shape[:-1], 2, stored.shape[-1])
    torch.bitwise_and(stored, 15, out=codes[..., 0, :])
    torch.bitwise_right_shift(stored, 4, out=codes[..., 1, :])
    return codes.flatten(-2)


def _fifth_bits(stored: Tensor) -> Tensor:
    """Of 32 codes, from four bytes."""
    return (stored[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> Parts:
    scale = _halves(blocks, 0, 2)
    return Parts(_nibbles(blocks[..., 2:]), scale, scale * -8)


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 4:]), _halves(blocks, 0, 2), _halves(blocks, 2, 4))


def _q5_0(blocks: Tensor) -> Parts:
    scale = _halves(blocks, 0, 2)
    return Parts(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]) << 4, scale, scale * -16)


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]) << 4
    return Parts(codes, _halves(blocks, 0, 2), _halves(blocks, 2, 4))


def _q8_0(blocks: Tensor) -> Parts:
    scale = _halves(blocks, 0, 2)
    return Parts(blocks[..., 2:] ^ 128, scale, scale * -128)


_NONLINEAR = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def _iq4_nl(blocks: Tensor) -> Parts:
    scale = _halves(blocks, 0, 2)
    table = torch.tensor(_NONLINEAR).add(128).to(torch.uint8)
    return Parts(table[_nibbles(blocks[..., 2:]).long()], scale, scale * -128)


# ---- blocks of 256 ----


def _scales_of_k(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight offsets in 6 bits, from twelve bytes."""
    low, middle, high = stored.split(4, dim=-1)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    return scales.float(), torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1).float()


def _nibbles_by_64(stored: Tensor) -> Tensor:
    """Eight blocks of 32 codes, from 128 bytes."""
    return _nibbles(stored.unflatten(-1, (4, 32))).flatten(-2)


def _q4_k(blocks: Tensor) -> Parts:
    scales, offsets = _scales_of_k(blocks[..., 4:16])
    both = _halves(blocks, 0, 4).float()
    return Parts(_nibbles_by_64(blocks[..., 16:]), both[..., :1] * scales, both[..., 1:] * -offsets)


def _q5_k(blocks: Tensor) -> Parts:
    scales, offsets = _scales_of_k(blocks[..., 4:16])
    both = _halves(blocks, 0, 4).float()
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(-2)
    codes = _nibbles_by_64(blocks[..., 48:]) | fifth << 4
    scale, offset = both[..., :1] * scales, both[..., 1:] * -offsets
    return Parts(codes, scale.repeat_interleave(2, -1), offset.repeat_interleave(2, -1))


def _q6_k(blocks: Tensor) -> Parts:
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    two = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3).flatten(-2)
    codes = (_nibbles(low) | two << 4).flatten(-2)
    scale = _halves(blocks, 208, 210).float() * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Parts(codes, scale, scale * -32)


FORMATS: dict[str, tuple[int, int, Callable[[Tensor], Parts]]] = {
    "Q4_0": (18, 4, _q4_0),
    "Q4_1": (20, 4, _q4_1),
    "Q5_0": (22, 8, _q5_0),
    "Q5_1": (24, 8, _q5_1),
    "Q8_0": (34, 8, _q8_0),
    "IQ4_NL": (18, 8, _iq4_nl),
    "Q4_K": (144, 4, _q4_k),
    "Q5_K": (176, 8, _q5_k),
    "Q6_K": (210, 8, _q6_k),
}
"""Name -> bytes of a block, bits of its codes as they are packed, and what takes it apart."""

"""The quantised formats of GGUF files as packed weights (``form.py``): ``pack_gguf``.

A row of a GGUF tensor is blocks of 32 or 256 numbers. All these formats are codes times a scale plus an offset, per 32 numbers
or per 16; they differ in how a block stores them. The K formats have a scale and an offset of 256 numbers, and whole numbers
that multiply them, per 32 or per 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.weights.form import pack_weight


class Parts(NamedTuple):
    """Codes ``[rows, blocks, numbers]``, and scale and offset ``[rows, blocks, n]`` of one tensor."""

    codes: Tensor
    scale: Tensor
    offset: Tensor
    table: Tensor | None = None
    """What each code stands for; None: itself."""
    factors: Tensor | None = None
    """``[2, rows, blocks, n]`` int8, of scale and offset, which then are ``[rows, blocks, 1]``."""


def pack_gguf(name: str, stored: Tensor, *, wide: bool = False) -> Tensor:
    """A GGUF tensor ``[out, bytes of a row]`` uint8 of the format called so, packed; wide: with scales in float32, but
    for K formats, whose scales are float16 always.

    ValueError for a format that is not read, a row that is no whole number of blocks, and scales that are no finite numbers.
    """
    if name not in FORMATS:
        raise ValueError(f"the format {name} is not read as it is; {', '.join(FORMATS)} are")
    size, bits, parts_of = FORMATS[name]
    if stored.shape[1] % size:
        raise ValueError(f"a row of {name} must have a multiple of {size} bytes, got {stored.shape[1]}")
    parts = parts_of(stored.view(len(stored), -1, size))
    if wide and parts.factors is None:
        parts = parts._replace(scale=parts.scale.float(), offset=parts.offset.float())
    return pack_parts(name, parts, bits)


def pack_parts(name: str, parts: Parts, bits: int) -> Tensor:
    """The packed weight of these parts. ValueError, with the name, for scales that are no finite numbers."""
    if not (parts.scale.isfinite().all() and parts.offset.isfinite().all()):
        raise ValueError(f"the scales of {name} must be finite numbers of their type, got others")
    factors = None if parts.factors is None else parts.factors.flatten(2)
    numbers = (part.reshape(len(part), -1) for part in parts[:3])
    return pack_weight(*numbers, bits=bits, table=parts.table, factors=factors)


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


_NONLINEAR = torch.tensor([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8)
"""128 more than each number."""


def _iq4_nl(blocks: Tensor) -> Parts:
    scale = _halves(blocks, 0, 2)
    return Parts(_nibbles(blocks[..., 2:]), scale, scale * -128, _NONLINEAR)


_FP4 = torch.tensor([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], dtype=torch.uint8)
"""Twice the numbers in 4 bits, of 0 to 6 and their negatives, and 12."""


def fp4_scales(exponents: Tensor, stored: Tensor) -> Tensor:
    """Two to the power of each byte less 128, for twice the numbers; NaN for 255. float16 if all are, and their multiples.

    stored: the blocks' codes, two in a byte. Blocks of zeros, whose exponent is the least, have any scale: a half.
    """
    is_zero = (stored & 0x77 == 0).all(-1, keepdim=True) & (exponents != 255)
    each = exponents.int().masked_fill(is_zero, 127)
    bits = torch.where(each < 2, 1 << 21 + each, each - 1 << 23)  # of a float32; the least two are subnormal
    scale = bits.view(torch.float32).masked_fill(each == 255, torch.nan)
    half = scale.half()
    return half if torch.equal(half.float(), scale) and bool((half * -12).isfinite().all()) else scale


def fp4(codes: Tensor, scale: Tensor) -> Parts:
    """Numbers in 4 bits, of blocks with these ``fp4_scales``."""
    return Parts(codes, scale, scale * -12, _FP4)


def _mxfp4(blocks: Tensor) -> Parts:
    return fp4(_nibbles(blocks[..., 1:]), fp4_scales(blocks[..., :1], blocks[..., 1:]))


# ---- blocks of 256 ----


def _k(codes: Tensor, scale: Tensor, offset: Tensor, of_scale: Tensor, of_offset: Tensor) -> Parts:
    """With these factors."""
    return Parts(codes, scale, offset, factors=torch.stack((of_scale, of_offset)).to(torch.int8))


def _factors(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Eight of the scale and eight of the offset in 6 bits, from twelve bytes."""
    low, middle, high = stored.split(4, dim=-1)
    of_scale = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    return of_scale, torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)


def _nibbles_by_64(stored: Tensor) -> Tensor:
    """Eight blocks of 32 codes, from 128 bytes."""
    return _nibbles(stored.unflatten(-1, (4, 32))).flatten(-2)


def _pairs_of_bits(stored: Tensor) -> Tensor:
    """Of all numbers, from 32 bytes for each 128 of them."""
    each = stored.unflatten(-1, (-1, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return (each & 3).flatten(-3)


def _q2_k(blocks: Tensor) -> Parts:
    factors = blocks[..., :16] & 15, blocks[..., :16] >> 4
    return _k(_pairs_of_bits(blocks[..., 16:80]), _halves(blocks, 80, 82), -_halves(blocks, 82, 84), *factors)


def _q3_k(blocks: Tensor) -> Parts:
    high = (blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(-2)
    two = blocks[..., None, 104:108] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    factors = (_nibbles(blocks[..., 96:104]) | (two & 3).flatten(-2) << 4).to(torch.int8) - 32
    scale = _halves(blocks, 108, 110)
    return _k(_pairs_of_bits(blocks[..., 32:96]) | high << 2, scale, -scale, factors, 4 * factors)


def _q4_k(blocks: Tensor) -> Parts:
    factors = _factors(blocks[..., 4:16])
    return _k(_nibbles_by_64(blocks[..., 16:]), _halves(blocks, 0, 2), -_halves(blocks, 2, 4), *factors)


def _q5_k(blocks: Tensor) -> Parts:
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(-2)
    codes = _nibbles_by_64(blocks[..., 48:]) | fifth << 4
    return _k(codes, _halves(blocks, 0, 2), -_halves(blocks, 2, 4), *_factors(blocks[..., 4:16]))


def _q6_k(blocks: Tensor) -> Parts:
    low = blocks[..., :128].unflatten(-1, (2, 64))
    codes = _nibbles(low).flatten(-2) | _pairs_of_bits(blocks[..., 128:192]) << 4
    scale, factors = _halves(blocks, 208, 210), blocks[..., 192:208].contiguous().view(torch.int8)
    return _k(codes, scale, scale * -32, factors, factors)


def _iq4_xs(blocks: Tensor) -> Parts:
    high = blocks[..., 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], dim=-1)
    scale = _halves(blocks, 0, 2).float() * ((low.flatten(-2) | high.flatten(-2) << 4).float() - 32)
    return Parts(_nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2), scale, scale * -128, _NONLINEAR)


def _of_32(scale: Tensor) -> Tensor:
    """The scale of a block of 256 for each 32 of it."""
    return scale.expand(*scale.shape[:-1], 8)


def _tq1_0(blocks: Tensor) -> Parts:
    """Five digits to the base of 3 in a byte: fractions of 256, whose digits come out by multiplication."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    parts = blocks[..., None, :32] * powers, blocks[..., None, 32:48] * powers, blocks[..., None, 48:52] * powers[:4]
    digits = torch.cat([part.flatten(-2) for part in parts], dim=-1).short() * 3 >> 8
    scale = _of_32(_halves(blocks, 52, 54))
    return Parts(digits.to(torch.uint8), scale, -scale)


def _tq2_0(blocks: Tensor) -> Parts:
    scale = _of_32(_halves(blocks, 64, 66))
    return Parts(_pairs_of_bits(blocks[..., :64]), scale, -scale)


FORMATS: dict[str, tuple[int, int, Callable[[Tensor], Parts]]] = {
    "Q4_0": (18, 4, _q4_0),
    "Q4_1": (20, 4, _q4_1),
    "Q5_0": (22, 8, _q5_0),
    "Q5_1": (24, 8, _q5_1),
    "Q8_0": (34, 8, _q8_0),
    "IQ4_NL": (18, 4, _iq4_nl),
    "MXFP4": (17, 4, _mxfp4),
    "TQ1_0": (54, 4, _tq1_0),
    "TQ2_0": (66, 4, _tq2_0),
    "Q2_K": (84, 4, _q2_k),
    "Q3_K": (110, 4, _q3_k),
    "IQ4_XS": (136, 4, _iq4_xs),
    "Q4_K": (144, 4, _q4_k),
    "Q5_K": (176, 8, _q5_k),
    "Q6_K": (210, 8, _q6_k),
}
"""Name -> bytes of a block, bits of its codes as they are packed, and what takes it apart."""

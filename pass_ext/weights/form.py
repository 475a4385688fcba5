"""The packed form of a weight in 4 or 8 bits, which ``linear_packed`` multiplies by: ``pack_weight``, and back.

    weight[o, i] = scale code[o, i] + offset,  scale and offset of output o for the 32 inputs around i, or for 16 of them
    with a table: table[code[o, i]] in place of the code

A packed weight is ``[out / 16, in / 32, bytes]`` uint8: blocks of 32 inputs of 16 outputs, which lie side by side.
csrc/core/linear.h has a block's layout. The bytes of a block tell the form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OUTPUTS, INPUTS = 16, 32
"""Of a block."""

_LOW, _HIGH = [0, 4, 1, 5], [2, 6, 3, 7]
"""The inputs of each byte of a word of eight codes in 4 bits."""
_BYTES = [0, 2, 1, 3]
"""The input of each byte of a word of four codes in 8 bits."""


class Form(NamedTuple):
    """What the blocks of a packed weight have."""

    bits: int
    scales: torch.dtype
    parts: int
    """1: scale and offset of 32 inputs; 2: of each half of them."""
    entries: int = 0
    """Bytes of the table."""

    @property
    def head(self) -> int:
        """Bytes of scales and offsets."""
        return self.parts * 2 * OUTPUTS * self.scales.itemsize

    @property
    def bytes(self) -> int:
        return self.head + self.entries + self.bits * INPUTS * OUTPUTS // 8


FORMS = (
    Form(4, torch.float16, 1),
    Form(4, torch.float16, 1, 16),
    Form(4, torch.float32, 1),
    Form(4, torch.float32, 1, 16),
    Form(4, torch.float32, 2),
    Form(8, torch.float16, 1),
    Form(8, torch.float32, 1),
    Form(8, torch.float32, 2),
)


def form_of(packed: Tensor) -> Form:
    """The form of a packed weight. ValueError if it is none."""
    found = next((form for form in FORMS if packed.dim() == 3 and form.bytes == packed.shape[2]), None)
    if found is None or packed.dtype != torch.uint8:
        sizes = ", ".join(str(form.bytes) for form in FORMS)
        raise ValueError(
            f"a packed weight must be uint8 [out / 16, in / 32, one of {sizes}], got {packed.dtype}{list(packed.shape)}"
        )
    return found


def pack_weight(codes: Tensor, scale: Tensor, offset: Tensor, *, bits: int, table: Tensor | None = None) -> Tensor:
    """A packed weight.

    Args:
        codes: ``[out, in]`` uint8, below 16 for 4 bits; ``in`` a multiple of 32.
        scale, offset: of the blocks of an output: ``[out, in / 32]`` float16 or float32, or ``[out, in / 16]`` float32.
        bits: 4 or 8.
        table: ``[16]`` uint8, what each code of 4 bits stands for; with scales of 32 inputs.

    Returns:
        ``[out / 16, in / 32, bytes]`` uint8, out rounded up; outputs after the last are zeros.

    Example:

        >>> codes, scale = torch.arange(32, dtype=torch.uint8)[None] % 16, torch.ones(1, 1, dtype=torch.float16)
        >>> packed = pass_ext.layers.pack_weight(codes, scale, -8 * scale, bits=4)
        >>> list(packed.shape), pass_ext.layers.unpack_weight(packed, 1)[0, :4]
        ([1, 1, 320], tensor([-8., -7., -6., -5.]))
    """
    outputs, width = codes.shape if codes.dim() == 2 else (0, 0)
    if codes.dtype != torch.uint8 or width == 0 or width % INPUTS:
        raise ValueError(
            f"codes must be uint8 [out, in] with in a multiple of {INPUTS}, got {codes.dtype}{list(codes.shape)}"
        )
    blocks, groups = width // INPUTS, -(-outputs // OUTPUTS)
    if table is not None and (table.dtype != torch.uint8 or table.shape != (16,)):
        raise ValueError(f"table must be uint8 [16], got {table.dtype}{list(table.shape)}")
    wanted = bits, scale.dtype, 0 if table is None else 16
    known = (f for f in FORMS if (f.bits, f.scales, f.entries) == wanted and scale.shape == (outputs, blocks * f.parts))
    form = next(known, None)
    if form is None or scale.shape != offset.shape or scale.dtype != offset.dtype:
        raise ValueError(
            "scale and offset must both be [out, in / 32] float16 or float32, or [out, in / 16] float32 without a table, and "
            f"bits 4, or 8 without a table; got {scale.dtype}{list(scale.shape)}, {offset.dtype}{list(offset.shape)}, {bits}"
            f"{'' if table is None else ' with a table'}"
        )
    if bits == 4 and codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"codes of 4 bits must be below 16, got {int(codes.max())}")
    packed = codes.new_zeros(groups, blocks, form.bytes)
    heads, tables, words = _views(packed, form)
    if table is not None:
        tables.copy_(table)
    missing = groups * OUTPUTS - outputs
    for place, numbers in enumerate((scale, offset)):
        numbers = torch.nn.functional.pad(numbers, (0, 0, 0, missing))
        heads[:, :, :, place] = numbers.reshape(groups, OUTPUTS, blocks, form.parts).permute(0, 2, 3, 1)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, missing)).contiguous()
    each = _words_of_fours(codes) if bits == 4 else _words_of_eights(codes)
    words.copy_(each.view(groups, OUTPUTS, blocks, bits).permute(0, 2, 3, 1))
    return packed


def _words_of_fours(codes: Tensor) -> Tensor:
    """A word of each eight codes: their lower halves' bits are those of the even ones."""
    eight = codes.view(torch.int64)
    halves = []
    for each in (eight & 0x000F000F000F000F, (eight >> 8).bitwise_and_(0x000F000F000F000F)):
        each |= each >> 12
        each &= 0x000000FF000000FF
        each |= each >> 24
        halves.append(each.bitwise_and_(0xFFFF))
    return (halves[0] | halves[1] << 16).to(torch.int32)


def _words_of_eights(codes: Tensor) -> Tensor:
    """A word of each four codes, whose second and third change places."""
    four = codes.view(torch.int32)
    return (
        (four & -0xFFFF01).bitwise_or_((four >> 8).bitwise_and_(0xFF00)).bitwise_or_((four << 8).bitwise_and_(0xFF0000))
    )


def unpack_weight(packed: Tensor, outputs: int) -> Tensor:
    """The numbers ``[outputs, in]`` of a packed weight, float32."""
    return unpack_rows(packed, torch.arange(outputs, device=packed.device))


def unpack_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """The numbers ``[n, in]`` float32 of these outputs ``[n]``."""
    form = form_of(packed)
    heads, tables, words = _views(packed, form)
    group, lane = rows // OUTPUTS, rows % OUTPUTS
    codes = words.view(torch.uint8).unflatten(-1, (OUTPUTS, 4))[group, :, :, lane]
    if form.bits == 8:
        inputs = torch.empty_like(codes)
        inputs[..., _BYTES] = codes
    else:
        inputs = codes.new_empty(*codes.shape[:-1], 8)
        inputs[..., _LOW], inputs[..., _HIGH] = codes & 15, codes >> 4
    numbers = heads[group, :, :, :, lane].float()  # [n, blocks, parts, 2]
    if form.entries:
        inputs = tables[group].gather(-1, inputs.flatten(2).long())
    inputs = inputs.view(len(rows), packed.shape[1], form.parts, -1)
    return (inputs * numbers[..., 0, None] + numbers[..., 1, None]).view(len(rows), -1)


def packed_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """A packed weight of these outputs ``[n]``, in their order."""
    form, places = form_of(packed), torch.arange(len(rows), device=packed.device)
    result = packed.new_zeros(-(-len(rows) // OUTPUTS), *packed.shape[1:])
    result[:, :, form.head : form.head + form.entries] = packed[:1, :, form.head : form.head + form.entries]
    for old, new in zip(_views(packed, form)[::2], _views(result, form)[::2], strict=True):
        new.movedim(-1, 1)[places // OUTPUTS, places % OUTPUTS] = old.movedim(-1, 1)[rows // OUTPUTS, rows % OUTPUTS]
    return result


def _views(packed: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and offsets [groups, blocks, parts, 2, 16], tables [groups, blocks, entries], and codes as words
    [groups, blocks, words, 16]."""
    groups, blocks = packed.shape[:2]
    heads = packed[..., : form.head].view(form.scales).view(groups, blocks, form.parts, 2, OUTPUTS)
    begin = form.head + form.entries
    words = packed[..., begin:].view(torch.int32).view(groups, blocks, form.bits, OUTPUTS)
    return heads, packed[..., form.head : begin], words

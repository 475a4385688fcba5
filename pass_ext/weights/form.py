"""The packed form of a weight in 4 or 8 bits, which ``linear_packed`` multiplies by: ``pack_weight``, and back.

    weight[o, i] = scale code[o, i] + offset,  scale and offset of output o for the 32 inputs around i
    with a table: table[code[o, i]] in place of the code
    with factors: scale and offset of 256 inputs, times whole numbers of 32 of them, or of 16: the K formats of GGUF

A packed weight is ``[out / 16, in / 32, bytes]`` uint8: blocks of 32 inputs of 16 outputs, which lie side by side. With factors
the bytes of eight blocks are one run. csrc/core/linear.h has a block's layout. The bytes of a block tell the form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OUTPUTS, INPUTS = 16, 32
"""Of a block."""
K_BLOCKS = 8
"""That share a scale and an offset, where they have factors."""

_LOW, _HIGH = [0, 4, 1, 5], [2, 6, 3, 7]
"""The inputs of each byte of a word of eight codes in 4 bits."""
_BYTES = [0, 2, 1, 3]
"""The input of each byte of a word of four codes in 8 bits."""


class Form(NamedTuple):
    """What the blocks of a packed weight have."""

    bits: int
    scales: torch.dtype
    entries: int = 0
    """Bytes of the table."""
    factors: int = 0
    """1: of the scale and of the offset of 32 inputs; 2: of each half of them; 0: none."""

    @property
    def steps(self) -> int:
        """Blocks that share a scale and an offset."""
        return K_BLOCKS if self.factors else 1

    @property
    def sizes(self) -> list[int]:
        """Bytes of scales and offsets, of factors, of the table and of codes, of so many blocks."""
        factors, codes = 2 * self.factors * OUTPUTS, self.bits * INPUTS * OUTPUTS // 8
        return [2 * OUTPUTS * self.scales.itemsize, self.steps * factors, self.entries, self.steps * codes]

    @property
    def bytes(self) -> int:
        return sum(self.sizes) // self.steps


FORMS = (
    Form(4, torch.float16, factors=1),
    Form(4, torch.float16),
    Form(4, torch.float16, factors=2),
    Form(4, torch.float16, entries=16),
    Form(4, torch.float32),
    Form(4, torch.float32, entries=16),
    Form(8, torch.float16, factors=1),
    Form(8, torch.float16),
    Form(8, torch.float16, factors=2),
    Form(8, torch.float32),
)


def form_of(packed: Tensor) -> Form:
    """The form of a packed weight. ValueError if it is none."""
    found = next((form for form in FORMS if packed.dim() == 3 and form.bytes == packed.shape[2]), None)
    if found is None or packed.dtype != torch.uint8 or packed.shape[1] % found.steps:
        sizes = ", ".join(str(form.bytes) for form in FORMS)
        whole = ", ".join(str(form.bytes) for form in FORMS if form.factors)
        raise ValueError(
            f"a packed weight must be uint8 [out / 16, in / 32, one of {sizes}], for {whole} with in a multiple of "
            f"{K_BLOCKS * INPUTS}; got {packed.dtype}{list(packed.shape)}"
        )
    return found


def pack_weight(
    codes: Tensor,
    scale: Tensor,
    offset: Tensor,
    *,
    bits: int,
    table: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """A packed weight.

    Args:
        codes: ``[out, in]`` uint8, below 16 for 4 bits; ``in`` a multiple of 32.
        scale, offset: of the blocks of an output: ``[out, in / 32]`` float16 or float32; with factors ``[out, in / 256]``
            float16.
        bits: 4 or 8.
        table: ``[16]`` uint8, what each code of 4 bits stands for; without factors.
        factors: ``[2, out, in / 32]`` or ``[2, out, in / 16]`` int8, what multiplies the scale, and the offset.

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
    each = 0 if factors is None else 2 if factors.shape[-1:] == (2 * blocks,) else 1
    form = Form(bits, scale.dtype, 0 if table is None else 16, each)
    if factors is not None and (factors.dtype != torch.int8 or factors.shape != (2, outputs, blocks * each)):
        raise ValueError(
            f"factors must be int8 [2, out, in / 32] or [2, out, in / 16], got {factors.dtype}{list(factors.shape)}"
        )
    shape = torch.Size((outputs, blocks // form.steps))
    if (
        form not in FORMS
        or blocks % form.steps
        or {scale.shape, offset.shape} != {shape}
        or scale.dtype != offset.dtype
    ):
        raise ValueError(
            "scale and offset must both be [out, in / 32] float16 or float32, or [out, in / 256] float16 with factors and "
            f"without a table, and bits 4, or 8 without a table; got {scale.dtype}{list(scale.shape)}, "
            f"{offset.dtype}{list(offset.shape)}, {bits}{'' if table is None else ' with a table'}"
            f"{'' if factors is None else f' with factors {list(factors.shape)}'}"
        )
    if bits == 4 and codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"codes of 4 bits must be below 16, got {int(codes.max())}")
    packed = codes.new_zeros(groups, blocks, form.bytes)
    heads, whole, tables, words = _views(packed, form)
    if table is not None:
        tables.copy_(table)
    missing = groups * OUTPUTS - outputs

    def in_groups(numbers: Tensor) -> Tensor:
        """``[groups, runs, n, 16]`` of ``[out, ...]``."""
        padded, runs = torch.nn.functional.pad(numbers, (0, 0, 0, missing)).contiguous(), blocks // form.steps
        return padded.view(groups, OUTPUTS, runs, numbers.shape[1] // runs).permute(0, 2, 3, 1)

    for place, numbers in enumerate((scale, offset)):
        heads[:, :, place, None] = in_groups(numbers)
        if factors is not None:
            whole[:, :, :, place] = in_groups(factors[place]).unflatten(2, (form.steps, each))
    words.copy_(
        in_groups(_words_of_fours(codes) if bits == 4 else _words_of_eights(codes)).unflatten(2, (form.steps, -1))
    )
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
    form, rows = form_of(packed), torch.arange(outputs, device=packed.device)
    heads, factors, tables, words = _views(packed, form)
    group, lane = rows // OUTPUTS, rows % OUTPUTS
    codes = words.view(torch.uint8).unflatten(-1, (OUTPUTS, 4))[group, :, :, :, lane]
    if form.bits == 8:
        inputs = torch.empty_like(codes)
        inputs[..., _BYTES] = codes
    else:
        inputs = codes.new_empty(*codes.shape[:-1], 8)
        inputs[..., _LOW], inputs[..., _HIGH] = codes & 15, codes >> 4
    if form.entries:
        inputs = tables[group].gather(-1, inputs.flatten(2).long())
    numbers = heads[group, :, :, lane].float()[:, :, None, :, None]  # [n, runs, steps, 2, parts]
    if form.factors:
        numbers = numbers * factors[group, ..., lane].float()
    inputs = inputs.view(*numbers.shape[:3], numbers.shape[-1], INPUTS // numbers.shape[-1])
    return (inputs * numbers[:, :, :, 0, :, None] + numbers[:, :, :, 1, :, None]).view(
        len(rows), INPUTS * packed.shape[1]
    )


def packed_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """A packed weight of these outputs ``[n]``, in their order."""
    form, places = form_of(packed), torch.arange(len(rows), device=packed.device)
    result = packed.new_zeros(-(-len(rows) // OUTPUTS), *packed.shape[1:])
    heads, factors, tables, words = zip(_views(packed, form), _views(result, form), strict=True)
    tables[1].copy_(tables[0][:1])
    for old, new in (heads, factors, words):
        new.movedim(-1, 1)[places // OUTPUTS, places % OUTPUTS] = old.movedim(-1, 1)[rows // OUTPUTS, rows % OUTPUTS]
    return result


def _views(packed: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of runs of ``steps`` blocks: scales and offsets [groups, runs, 2, 16], factors of both [groups, runs, steps, 2, factors,
    16], tables [groups, runs, entries], and codes as words [groups, runs, steps, words, 16]."""
    runs = packed.view(len(packed), packed.shape[1] // form.steps, form.steps * form.bytes)
    heads, factors, tables, codes = runs.split(form.sizes, -1)
    return (
        heads.view(form.scales).unflatten(-1, (2, OUTPUTS)),
        factors.view(torch.int8).unflatten(-1, (form.steps, 2, form.factors, OUTPUTS)),
        tables,
        codes.view(torch.int32).unflatten(-1, (form.steps, form.bits, OUTPUTS)),
    )

"""The weights of quantised checkpoints, which have several tensors in place of a layer's weight: GPTQ, AWQ, compressed-tensors.

    weight[o, i] = scale[o, g] (code[o, i] - zero[o, g]),  g the group of input i

``Grouped`` is what all of them say; they differ in how integers lie in words of 32 bits, and in what a zero is counted from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.weights.form import INPUTS, pack_weight

Parts = Mapping[str, Tensor]
"""The tensors of one layer, by the last part of their names."""


class Grouped(NamedTuple):
    """A weight as codes of at most 8 bits, in groups of inputs."""

    codes: Tensor
    """``[out, in]`` uint8."""
    scale: Tensor
    """``[out, groups]``, of any float dtype; groups are equally long."""
    offset: Tensor
    """``[out, groups]`` float64: weight = scale code + offset."""
    bits: int
    order: Tensor | None = None
    """``[in]``: the input that each column has; None: its own."""

    def dense(self) -> Tensor:
        """The numbers ``[out, in]``, rounded to float32 once."""
        outputs, width = self.codes.shape
        codes = self.codes.view(outputs, self.scale.shape[1], -1)
        numbers = (codes * self.scale.double()[..., None] + self.offset[..., None]).float().view(outputs, width)
        return numbers if self.order is None else numbers[:, self.order.argsort()]

    def packed(self, *, wide: bool = False) -> Tensor | None:
        """The packed weight, in the smallest form that has these scales and offsets, or, if wide, in float32; None: its groups
        have none."""
        width, groups = self.codes.shape[1], self.scale.shape[1]
        size = width // groups
        if width % INPUTS or size % INPUTS:
            return None
        scale, offset = (part.repeat_interleave(size // INPUTS, 1) for part in (self.scale.double(), self.offset))
        half = scale.half(), offset.half()
        is_exact = torch.equal(half[0].double(), scale) and torch.equal(half[1].double(), offset)
        numbers = half if is_exact and not wide else (scale.float(), offset.float())
        return pack_weight(self.codes, *numbers, bits=4 if self.bits <= 4 else 8)


def grouped(layout: str, parts: Parts, outputs: int, width: int) -> Grouped:
    """The weight that the tensors of a layer ``[out, in]`` make. ValueError, in words, for tensors that make none."""
    names = frozenset(parts)
    read = next((read for read, needed, more in LAYOUTS[layout] if needed <= names <= needed | more), None)
    if read is None:
        raise ValueError(f"has the tensors {', '.join(sorted(names))}, which are no weight of {layout}")
    found = read(parts, outputs, width)
    if found.codes.shape != (outputs, width) or found.scale.shape[0] != outputs or width % max(1, found.scale.shape[1]):
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(parts.items()))
        raise ValueError(f"must be a weight [{outputs}, {width}] in whole groups, and the file has {sizes}")
    if not (found.scale.isfinite().all() and found.offset.isfinite().all()):
        raise ValueError("must have scales that are finite numbers, got others")
    return found


def _with_zeros(codes: Tensor, scale: Tensor, zero: Tensor | int, bits: int, order: Tensor | None = None) -> Grouped:
    if isinstance(zero, Tensor) and zero.shape != scale.shape:
        raise ValueError(f"must have a zero for each scale, got {list(zero.shape)} for {list(scale.shape)}")
    return Grouped(codes, scale, scale.double() * -zero, bits, order)


# ---- integers in words ----


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The integers of ``bits`` bits, one after the other, that words ``[..., W]`` int32 have: ``[..., 32 W / bits]`` uint8."""
    each = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return (each[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
    if each.shape[-1] % bits:
        raise ValueError(f"must have words with whole integers of {bits} bits, got {words.shape[-1]} in a row")
    eight = each.unflatten(-1, (-1, bits)).long()  # bytes that eight integers share
    whole = (eight << torch.arange(0, 8 * bits, 8)).sum(-1, keepdim=True)
    return (whole >> torch.arange(0, 8 * bits, bits) & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def _bits(words: int, count: int) -> int:
    """Of each of ``count`` integers in so many words."""
    bits = 32 * words // max(1, count)
    if not 2 <= bits <= 8:
        raise ValueError(f"must have integers of 2 to 8 bits, got {words} words of 32 bits for {count} of them")
    return bits


# ---- layouts ----


def _gptq(parts: Parts, outputs: int, width: int, *, is_first: bool = True) -> Grouped:
    """Integers along the inputs, zeros along the outputs. is_first: zeros are stored less 1, in whole words."""
    bits = _bits(len(parts["qweight"]), width)
    codes = unpack_words(parts["qweight"].t(), bits)
    zeros = parts["qzeros"]
    if is_first:
        ones = sum(1 << place for place in range(0, 32, bits)) if 32 % bits == 0 else 0
        zeros = (zeros.long() + ones).to(torch.int32) if ones else zeros
    zero = unpack_words(zeros, bits)[:, :outputs].t().long() + int(is_first and 32 % bits != 0)
    codes, order = _in_order(codes[:, :width], parts.get("g_idx"), len(parts["scales"]))
    return _with_zeros(codes, parts["scales"].t(), zero, bits, order)


_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight integers of an AWQ word lie in it."""


def _awq(parts: Parts, outputs: int, width: int) -> Grouped:
    """Integers of 4 bits along the outputs, in each word in an order of its own."""
    codes, zero = (
        unpack_words(parts[name], 4).unflatten(-1, (-1, 8))[..., _AWQ_PLACES].flatten(-2).t()
        for name in ("qweight", "qzeros")
    )
    return _with_zeros(codes.contiguous(), parts["scales"].t(), zero.long(), 4)


def _packed(parts: Parts, outputs: int, width: int) -> Grouped:
    """compressed-tensors: integers along the inputs, zeros along the outputs or as bytes, both from the middle."""
    if parts["weight_shape"].tolist() != [outputs, width]:
        raise ValueError(f"must be a weight [{outputs}, {width}], and the file has {parts['weight_shape'].tolist()}")
    bits = _bits(parts["weight_packed"].shape[1], width)
    codes = unpack_words(parts["weight_packed"], bits)[:, :width]
    scale, zero = parts["weight_scale"], parts.get("weight_zero_point")
    middle: Tensor | int = 1 << bits - 1
    if zero is not None and zero.dtype is torch.int32:
        middle = unpack_words(zero.t(), bits)[:, :outputs].t().long()
    elif zero is not None:
        middle = zero.long() + middle
    codes, order = _in_order(codes, parts.get("weight_g_idx"), scale.shape[1])
    return _with_zeros(codes, scale, middle, bits, order)


def _bytes(parts: Parts, outputs: int, width: int) -> Grouped:
    """compressed-tensors: signed bytes."""
    scale, zero = parts["weight_scale"], parts.get("weight_zero_point")
    codes = parts["weight"].view(torch.uint8) ^ 128
    return _with_zeros(codes, scale, 128 if zero is None else zero.long() + 128, 8)


def _in_order(codes: Tensor, groups: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """Codes whose groups lie together, and the inputs that they are of. groups: of each input."""
    width = codes.shape[1]
    if groups is None or not count or width % count or bool((groups == -1).all()):
        return codes, None
    together = torch.arange(width) // (width // count)
    if torch.equal(groups.long(), together):
        return codes, None
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], together):
        raise ValueError(f"must have groups of {width // count} inputs each, got others in its table of groups")
    return codes[:, order].contiguous(), order


Layout = tuple[Callable[[Parts, int, int], Grouped], frozenset[str], frozenset[str]]

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "gptq": ((_gptq, frozenset({"qweight", "qzeros", "scales"}), frozenset({"g_idx"})),),
    "gptq_v2": ((partial(_gptq, is_first=False), frozenset({"qweight", "qzeros", "scales"}), frozenset({"g_idx"})),),
    "awq": ((_awq, frozenset({"qweight", "qzeros", "scales"}), frozenset()),),
    "compressed-tensors": (
        (
            _packed,
            frozenset({"weight_packed", "weight_scale", "weight_shape"}),
            frozenset({"weight_zero_point", "weight_g_idx"}),
        ),
        (_bytes, frozenset({"weight", "weight_scale"}), frozenset({"weight_zero_point"})),
    ),
}
"""Name -> what reads a layer, the tensors that it needs, and those that it may have."""

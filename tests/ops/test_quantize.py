"""quantize_rows on every backend: the bits of the reference, and what dequantize_rows makes of them."""

import emulator
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import pass_ext
from pass_ext import reference
from pass_ext.layers import dequantize_rows, quantize_rows
from pass_ext.ops.quantize import CODE_HEADER, MOST_OF_CODES
from pass_ext.testing import assert_same_bits

CODES = tuple(MOST_OF_CODES)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check(backend, rows, codes):
    """The stored rows, which have the bits of the reference."""
    stored = quantize_rows(rows.to(backend.device), codes)
    with _disable_current_modes():
        expected = reference.quantize_rows(rows.cpu(), codes)
        assert stored.dtype == codes and stored.shape == expected.shape and stored.is_contiguous()
        stored = stored.cpu()
        assert_same_bits(stored.view(torch.uint8), expected.view(torch.uint8))
    return stored


@pytest.mark.sanitizer
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_are_those_of_the_reference(backend, dtype, codes):
    """Widths of whole vectors and not, above a warp's numbers and the CPU's buffer; rows of all sizes."""
    torch.manual_seed(0)
    sizes = torch.tensor([1e-44, 1e-38, 1e-30, 1e-3, 1.0, 100.0, 6e4, 1e30])[:, None]
    for width in (1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 128, 129, 256, 264, 576, 577):
        check(backend, (torch.randn(8, width) * sizes).to(dtype), codes)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_code_and_the_middle_of_two(backend, dtype, codes):
    """A row whose scale is a power of two, so that numbers over it are exact: ties go to the even code."""
    every = torch.arange(256, dtype=torch.uint8).view(codes).float()
    every = every[every.isfinite() & (every.abs() <= MOST_OF_CODES[codes])].sort().values
    middles = (every[1:] + every[:-1]) / 2
    for factor in (1.0, 0.25, 2.0**-120):
        rows = torch.cat([every, middles, middles.nextafter(every[1:]), middles.nextafter(every[:-1])]) * factor
        check(backend, rows.to(dtype), codes)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_are_no_numbers_or_hardly_any(backend, dtype, codes):
    """NaN, infinity, both, numbers so small that their scale is rounded or zero, the largest, and zeros of both signs."""
    tiny = torch.tensor(1, dtype=torch.int16).view(dtype) if dtype.itemsize == 2 else torch.tensor(1e-45)
    for width in (16, 19):
        rows = torch.ones(9, width).to(dtype)
        rows[0, 3], rows[1, 3] = torch.nan, -torch.inf
        rows[2, :2] = torch.tensor([torch.inf, -torch.nan])
        rows[3], rows[4], rows[4, 3] = tiny, tiny * 3, -300 * tiny
        rows[5], rows[6] = torch.finfo(dtype).max, 0.0
        rows[6, 1], rows[7, 1] = -0.0, -0.0
        stored = check(backend, rows, codes)
        numbers = dequantize_rows(stored)
        assert numbers[:3].isnan().all()
        assert numbers[[3, 4, 6, 7, 8]].isfinite().all()  # the largest number of float32 may be rounded up
        assert (numbers[6] == 0).all() and (numbers[8] == 1).all()
        assert (stored.view(torch.uint8)[6] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_any_strides(backend, dtype):
    """Memory between the rows is NaN and is not read."""
    torch.manual_seed(0)
    dense = torch.randn(4, 3, 5, 24).to(dtype)
    wide = torch.full((4, 3, 5, 40), torch.nan).to(dtype)
    wide[..., :24] = wide[..., 7:31] = dense[..., :24]
    for rows in (
        dense.transpose(1, 3),
        dense.transpose(0, 2),
        dense[:1, :1],
        dense[:, :1].expand(4, 6, 5, 24),
        dense[..., ::2],
        dense[..., 1:8],
        dense[0, 0, 0],
        wide[..., 8:31],
        wide[:, 1, ..., 7:31],
    ):
        stored = check(backend, rows, torch.int8)
        shown = stored.new_zeros(2, *stored.shape)[1].copy_(stored)
        assert torch.equal(dequantize_rows(shown), dequantize_rows(stored))
    assert quantize_rows(dense[:0].to(backend.device), torch.int8).shape == (0, 3, 5, 40)


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_rows_are_the_nearest_codes(codes):
    torch.manual_seed(0)
    rows = torch.randn(5, 3, 48) * torch.tensor([1e-30, 1e-3, 1.0, 100.0, 1e30])[:, None, None]
    rows[2, 1] = 0.0
    stored = quantize_rows(rows, codes)
    assert stored.shape == (5, 3, CODE_HEADER + 48) and (stored[..., 4:16].view(torch.uint8) == 0).all()
    numbers = dequantize_rows(stored)
    every = torch.arange(256, dtype=torch.uint8).view(codes).float()
    every = every[every.isfinite() & (every.abs() <= MOST_OF_CODES[codes])]
    scales = rows.abs().amax(-1, keepdim=True) / MOST_OF_CODES[codes]
    nearest = (scales[..., None] * every - rows[..., None]).abs().amin(-1)
    torch.testing.assert_close((numbers - rows).abs(), nearest, rtol=1e-3, atol=0.0)
    assert torch.equal(numbers[2, 1], torch.zeros(48))


def test_a_row_is_written_once(backend):
    if backend.name != "emulated":
        pytest.skip("counts the emulator's bytes")
    rows = torch.randn(5, 3, 264).half()
    check(backend, rows, torch.float8_e5m2)
    counted = emulator.load().count_bytes()
    assert counted["rows"] == (2 * rows.numel() * 2, 0)  # the second time from the cache
    assert counted["output 0"] == (0, 15 * (CODE_HEADER + 264))


REFUSED = [
    (torch.ones(2, 16).double(), torch.int8, r"rows must be bfloat16, float16 or float32, got float64\[2, 16\]"),
    (torch.tensor(1.0), torch.int8, r"rows must have shape \[\.\.\., D\], D at least 1, got float32\[\]"),
    (torch.ones(2, 0), torch.int8, r"rows must have shape \[\.\.\., D\], D at least 1, got float32\[2, 0\]"),
    (torch.ones(2, 16), torch.int16, r"dtype must be int8, float8_e4m3fn or float8_e5m2, got int16"),
]


@pytest.mark.parametrize(("rows", "codes", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_bad_input_is_refused_in_words(backend, rows, codes, message):
    with pytest.raises(RuntimeError, match="pass_ext::quantize_rows: " + message):
        quantize_rows(rows.to(backend.device), codes)


def test_other_rows_are_not_dequantised():
    with pytest.raises(TypeError, match=r"quantised rows must be torch.int8, .* got torch.int16"):
        pass_ext.layers.dequantize_rows(torch.ones(2, 32, dtype=torch.int16))

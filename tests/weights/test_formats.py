"""GGUF formats as packed weights: the numbers are those that gguf reads, and what is no weight is refused. Dense weights are
rounded."""

import numpy as np
import pytest
import torch

import pass_ext
from pass_ext.layers import pack_weight, unpack_weight
from pass_ext.weights.form import form_of, packed_rows
from pass_ext.weights.formats import FORMATS, pack_gguf
from pass_ext.weights.rounding import rounded

gguf = pytest.importorskip("gguf")

SCALES = {
    "Q6_K": (208, 1),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 2),
    "Q3_K": (108, 1),
}
SCALES |= {"TQ1_0": (52, 1), "TQ2_0": (64, 1), "MXFP4": (0, 0)}
"""Format -> where a block has its float16 numbers, and how many; all other formats have one at the beginning."""


def stored(name, rows=37, blocks=6, exponents=(112, 140)):
    """Random blocks of a format, with scales that are finite."""
    random, size = np.random.default_rng(len(name)), FORMATS[name][0]
    raw = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    place, count = SCALES.get(name, (0, 1))
    scales = random.normal(size=(rows, blocks, count)).astype(np.float16)
    raw[..., place : place + 2 * count] = scales.view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = random.integers(*exponents, (rows, blocks))
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_the_numbers_that_gguf_reads(name):
    raw = stored(name)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    packed = pack_gguf(name, torch.from_numpy(raw))
    assert form_of(packed).bits == (8 if name[1] in "568" else 4)
    assert form_of(packed).entries == (16 if name in ("IQ4_NL", "IQ4_XS", "MXFP4") else 0)
    assert np.array_equal(unpack_weight(packed, 37).numpy(), expected)
    rows = torch.tensor([36, 0, 15, 16, 16])
    embedded = pass_ext.lookahead_embed(rows, packed, torch.zeros(0, expected.shape[1]))
    assert np.array_equal(embedded.numpy(), expected[rows.numpy()])
    assert np.array_equal(unpack_weight(packed_rows(packed, rows), 5).numpy(), expected[rows.numpy()])


@pytest.mark.parametrize("name", [name for name in FORMATS if "_K" in name])
def test_k_formats_have_one_form(name):
    raw = torch.from_numpy(stored(name))
    assert torch.equal(pack_gguf(name, raw, wide=True), pack_gguf(name, raw))


def test_exponents_that_are_no_float16_are_read():
    raw = stored("MXFP4", exponents=(2, 250))
    packed = pack_gguf("MXFP4", torch.from_numpy(raw))
    assert np.array_equal(unpack_weight(packed, 37).numpy(), gguf.dequantize(raw, gguf.GGMLQuantizationType.MXFP4))
    assert torch.equal(pack_gguf("MXFP4", torch.from_numpy(raw), wide=True), packed)
    assert form_of(packed).bytes == 400 and form_of(pack_gguf("MXFP4", torch.from_numpy(stored("MXFP4")))).bytes == 336


def test_blocks_of_zeros_need_no_exponent():
    """Which is then the least, and no float16."""
    raw = stored("MXFP4")
    raw[3, :17], raw[4, 17:18], raw[4, 18:34] = 0, 0, np.tile([0x08, 0x80, 0x88, 0x00], 4)
    packed = pack_gguf("MXFP4", torch.from_numpy(raw))
    assert form_of(packed).bytes == 336
    assert np.array_equal(unpack_weight(packed, 37).numpy(), gguf.dequantize(raw, gguf.GGMLQuantizationType.MXFP4))
    raw[3, 0] = 255
    with pytest.raises(ValueError, match="scales of MXFP4 must be finite"):
        pack_gguf("MXFP4", torch.from_numpy(raw))


def test_the_largest_scale_of_q3_k_is_read_and_of_q6_k_refused():
    """Offsets are a factor times the scale of Q3_K, and -32 times that of Q6_K."""
    for name, place in (("Q3_K", 108), ("Q6_K", 208)):
        raw = stored(name, rows=1, blocks=1)
        raw[0, place : place + 2] = np.array([65504.0], np.float16).view(np.uint8)
        if name == "Q6_K":
            with pytest.raises(ValueError, match="scales of Q6_K must be finite"):
                pack_gguf(name, torch.from_numpy(raw))
        else:
            expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
            assert np.array_equal(unpack_weight(pack_gguf(name, torch.from_numpy(raw)), 1).numpy(), expected)


def test_no_outputs():
    for width, more in ((64, {}), (256, {"factors": torch.zeros(2, 0, 16, dtype=torch.int8)})):
        scale = torch.zeros(0, width // (256 if more else 32), dtype=torch.float16)
        packed = pack_weight(torch.zeros(0, width, dtype=torch.uint8), scale, scale, bits=4, **more)
        assert unpack_weight(packed, 0).shape == (0, width)


def test_formats_and_scales_that_cannot_be_read_are_refused():
    with pytest.raises(ValueError, match=r"the format IQ2_XXS is not read as it is; Q4_0, .* are"):
        pack_gguf("IQ2_XXS", torch.zeros(1, 66, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a row of Q4_0 must have a multiple of 18 bytes, got 19"):
        pack_gguf("Q4_0", torch.zeros(1, 19, dtype=torch.uint8))
    for name in ("Q4_0", "Q8_0", "Q4_K"):
        raw = torch.from_numpy(stored(name))
        raw[3, :2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)  # NaN
        with pytest.raises(ValueError, match=f"scales of {name} must be finite"):
            pack_gguf(name, raw)
    raw = torch.from_numpy(stored("Q8_0"))
    raw[3, :2] = torch.tensor([60000.0], dtype=torch.float16).view(torch.uint8)  # -128 of them are no float16
    with pytest.raises(ValueError, match="scales of Q8_0 must be finite"):
        pack_gguf("Q8_0", raw)
    raw = torch.from_numpy(stored("MXFP4"))
    raw[3, 0] = 255
    with pytest.raises(ValueError, match="scales of MXFP4 must be finite"):
        pack_gguf("MXFP4", raw)
    zero = torch.zeros(16, 18, dtype=torch.uint8)
    assert torch.equal(unpack_weight(pack_gguf("Q4_0", zero), 16), torch.zeros(16, 32)), "scales of 0 are numbers"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 33), torch.uint8, (2, 1), torch.float16, 4), "codes must be uint8 .* multiple of 32"),
        (((2, 32), torch.int8, (2, 1), torch.float16, 4), "codes must be uint8"),
        (((2, 32), torch.uint8, (2, 3), torch.float16, 4), "scale and offset must both be"),
        (((2, 32), torch.uint8, (2, 2), torch.float16, 8), "scale and offset must both be"),
        (((2, 32), torch.uint8, (2, 1), torch.float16, 5), "scale and offset must both be"),
    ],
)
def test_numbers_that_have_no_packed_form_are_refused(arguments, message):
    shape, dtype, scales, kind, bits = arguments
    scale = torch.zeros(scales, dtype=kind)
    with pytest.raises(ValueError, match=message):
        pack_weight(torch.zeros(shape, dtype=dtype), scale, scale, bits=bits)
    with pytest.raises(ValueError, match="codes of 4 bits must be below 16, got 16"):
        pack_weight(torch.full((1, 32), 16, dtype=torch.uint8), *[torch.zeros(1, 1, dtype=torch.float16)] * 2, bits=4)
    for table, bits, words in (
        (torch.zeros(15, dtype=torch.uint8), 4, r"table must be uint8 \[16\], got torch.uint8\[15\]"),
        (torch.zeros(16), 4, r"table must be uint8 \[16\], got torch.float32\[16\]"),
        (torch.zeros(16, dtype=torch.uint8), 8, "8 with a table"),
    ):
        with pytest.raises(ValueError, match=words):
            pack_weight(torch.zeros(1, 32, dtype=torch.uint8), *[torch.zeros(1, 1).half()] * 2, bits=bits, table=table)
    codes, scale = torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(1, 1).half()
    for factors in (
        torch.zeros(2, 1, 8),
        *(torch.zeros(size, dtype=torch.int8) for size in ((), (2, 1, 0), (2, 1, 24))),
    ):
        with pytest.raises(ValueError, match="factors must be int8 "):
            pack_weight(codes, scale, scale, bits=4, factors=factors)
    with pytest.raises(ValueError, match="a packed weight must be uint8"):
        unpack_weight(torch.zeros(2, 3, 321, dtype=torch.uint8), 32)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_dense_weight_is_rounded_in_groups_of_32(bits):
    """From a group's least number to its most, by half a step at most; scales and offsets are float16."""
    weight = torch.randn(37, 96, generator=torch.Generator().manual_seed(0)) + 0.3
    packed = rounded(weight, bits)
    assert form_of(packed) == (bits, torch.float16, 0, 0)
    groups = weight.unflatten(1, (-1, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    error = (unpack_weight(packed, 37) - weight).unflatten(1, (-1, 32)).abs().amax(-1)
    assert (error <= 0.5 * step + groups.abs().amax(-1) * 2**-9).all() and (error > 0.3 * step).all()


def test_equal_numbers_are_rounded_to_themselves():
    weight = torch.tensor([[0.5] * 32 + [0.0] * 32, [1e-9] * 32 + [-2.0] * 32])
    for bits in (4, 8):
        assert torch.equal(unpack_weight(rounded(weight, bits), 2), weight.half().float())

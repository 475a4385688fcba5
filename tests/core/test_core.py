"""csrc/core and csrc/cpu/simd-inl.h on the CPU: Philox against its published vectors, 16-bit floats against torch, at every
instruction set of this processor. The same headers inside kernels: emulator/test_primitives.py."""

from functools import cache

import numpy as np
import pytest
import torch
from support.native import ROOT, build_module, quote

from pass_ext.testing import cpu_backends

HERE = ROOT / "tests" / "core"
ISAS = [backend.name.removeprefix("cpu-") for backend in cpu_backends()]
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FULL = 0xFFFFFFFF


@cache
def core():
    warnings = "-Wall -Wextra -Wno-maybe-uninitialized -Wno-uninitialized"
    flags = f"-O2 -ffp-contract=off {warnings} -I{quote(ROOT / 'csrc')} -I{quote(HERE)}"
    return build_module("_core", {HERE / "core.cpp": ""}, flags)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([FULL] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert core().philox4x32(counter, key) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", HALVES)
def test_every_16_bit_float_widens_as_in_torch(isa, name):
    bits = np.arange(65536, dtype=np.uint16)
    got = getattr(core(), f"widen_{name}")(isa, bits)
    expected = torch.from_numpy(bits.view(np.int16)).view(HALVES[name]).float().numpy()
    number = ~np.isnan(expected)
    assert np.isnan(got[~number]).all()
    assert np.array_equal(got[number].view(np.int32), expected[number].view(np.int32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", HALVES)
def test_floats_narrow_as_in_torch(isa, name):
    """All 16-bit values, the floats around and halfway between them, subnormals among them, and random bits."""
    exact = torch.arange(65536).to(torch.int16).view(HALVES[name]).float().view(torch.int32)
    half_step = 0x8000 if name == "bfloat16" else 0x1000
    offsets = (0, 1, -1, half_step, half_step + 1, half_step - 1)
    random = torch.randint(-(2**31), 2**31, (200_001,), generator=torch.Generator().manual_seed(0)).int()
    values = torch.cat([*(exact + offset for offset in offsets), random]).view(torch.float32)
    got = getattr(core(), f"narrow_{name}")(isa, values.numpy())
    expected = values.to(HALVES[name])
    number = ~values.isnan().numpy()
    assert torch.from_numpy(got.view(np.int16)).view(HALVES[name])[~number].isnan().all()
    assert np.array_equal(got[number], expected.view(torch.int16).numpy().view(np.uint16)[number])


# ---- core/elementary-inl.h: accurate, and the same bits at every instruction set and for single floats ----


def same_bits_everywhere(compute):
    expected = compute("scalar")
    for isa in ISAS:
        assert np.array_equal(compute(isa).view(np.int32), expected.view(np.int32)), isa
    return expected


def ulps(got, exact):
    """Distance in units of the last place of the exact result."""
    return np.abs(got.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)


def test_exponential_is_within_two_ulp():
    x = -np.abs(np.random.default_rng(0).normal(0, 25, 400_000)).astype(np.float32)
    x[:64] = [0, -1e-30, -1e-8, -86, *[-0.34657359 * k for k in range(60)]]
    got = same_bits_everywhere(lambda isa: core().exponentials(isa, x))
    inside = x >= -86
    assert ulps(got[inside], np.exp(x[inside].astype(np.float64))).max() <= 2
    assert (got[~inside] == 0).all() and got[0] == 1
    far = np.full(64, -np.inf, dtype=np.float32)
    assert (same_bits_everywhere(lambda isa: core().exponentials(isa, far)) == 0).all()


def test_logarithm_is_within_two_ulp():
    random = np.random.default_rng(1)
    x = np.concatenate([np.exp(random.uniform(-87, 88, 200_000)), 1 + random.normal(0, 1e-3, 200_000)])
    x = x.astype(np.float32)
    x[:4] = [1, 2**-126, np.nextafter(np.float32(1), np.float32(0)), np.nextafter(np.float32(1), np.float32(2))]
    got = same_bits_everywhere(lambda isa: core().logarithms(isa, x))
    exact = np.log(x.astype(np.float64))
    assert got[0] == 0
    assert ulps(got[exact != 0], exact[exact != 0]).max() <= 2


def test_exponential_variate_keeps_relative_precision_at_both_ends():
    ends = np.concatenate([np.arange(512), 2**31 - 256 + np.arange(512), 2**32 - 512 + np.arange(512)])
    words = np.concatenate([ends, np.random.default_rng(2).integers(0, 2**32, 400_000)]).astype(np.uint32)[:401_536]
    got = same_bits_everywhere(lambda isa: core().exponential_variates(isa, words))
    exact = -np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-32)
    assert (got > 0).all() and np.isfinite(got).all()
    assert (np.abs(got - exact) / exact).max() <= 4 * 2.0**-24


def test_philox_on_vectors_is_philox():
    counters = np.random.default_rng(3).integers(0, 2**32, 4096).astype(np.uint32)
    expected = core().philox_words("scalar", counters, 0x299F31D0A4093822)
    for isa in ISAS:
        assert np.array_equal(core().philox_words(isa, counters, 0x299F31D0A4093822), expected), isa


def test_high_product_is_the_upper_half_of_a_product():
    ends = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
    random = np.random.default_rng(1).integers(0, 2**64, (500, 2), dtype=np.uint64).tolist()
    for a, b in [*((a, b) for a in ends for b in ends), *random]:
        assert core().high_product(a, b) == a * b >> 64, (a, b)


def test_the_other_vector_operations_agree():
    a, b = np.random.default_rng(4).normal(0, 2, (2, 4096)).astype(np.float32)
    lane0 = {8: a.reshape(-1, 8)[:, :1].repeat(8, 1).ravel(), 16: a.reshape(-1, 16)[:, :1].repeat(16, 1).ravel()}
    picked = np.where((a < b) & (a > -1), np.minimum(a, b), np.maximum(a, b))
    for isa in ISAS:
        expected = (picked + np.trunc(a + b)) + lane0[16 if isa.startswith("avx512") else 8]
        assert np.array_equal(core().other_operations(isa, a, b), expected), isa

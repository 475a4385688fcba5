"""csrc/core and csrc/cpu/simd.h on the CPU: Philox against its published vectors, 16-bit floats against torch, at every
instruction set of this processor. The same headers inside kernels: emulator/test_primitives.py."""

from functools import cache

import numpy as np
import pytest
import torch
from native import ROOT, build_module

from pass_ext.testing import cpu_backends

ISAS = [backend.name.removeprefix("cpu-") for backend in cpu_backends()]
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FULL = 0xFFFFFFFF


@cache
def core():
    flags = f"-O2 -Wall -Wextra -Wno-maybe-uninitialized -I{ROOT / 'csrc'} -I{ROOT / 'tests'}"
    return build_module("_core", {ROOT / "tests" / "core.cpp": ""}, flags)


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
    """All 16-bit values, what lies around them and halfway between, subnormals among them, and random bits."""
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

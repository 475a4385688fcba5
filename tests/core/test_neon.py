"""The CPU library on ARM: level neon_dot, run on an emulated processor, and all files of the library compiled for one.

Where this is no ARM machine, g++ for aarch64 and qemu-user do it (Debian: g++-aarch64-linux-gnu, qemu-user).
"""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.paths import ROOT

pytestmark = pytest.mark.slow  # the quick tests of the same kernels: test_core.py, ops/test_linear.py
IS_ARM = platform.machine() == "aarch64"
COMPILER = os.environ.get("CXX", "g++") if IS_ARM else "aarch64-linux-gnu-g++"
FLAGS = [
    "-std=c++17",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-maybe-uninitialized",
    f"-I{ROOT / 'csrc'}",
]
needs_compiler = pytest.mark.skipif(
    not shutil.which(COMPILER), reason="no compiler for ARM: apt install g++-aarch64-linux-gnu"
)


@needs_compiler
@pytest.mark.skipif(not (IS_ARM or shutil.which("qemu-aarch64")), reason="no emulator of ARM: apt install qemu-user")
@pytest.mark.parametrize("name", ["neon", "neon_attention"])
def test_it_has_the_bits_of_the_portable_level(name, tmp_path):
    """Every operation of csrc/cpu/simd_neon-inl.h, products with dense weights and with every packed form; attention.

    Extreme and random codes and digits also give the exact sum.
    """
    program, here = tmp_path / name, ROOT / "tests" / "core"
    command = [COMPILER, *FLAGS, "-O1", "-static", f"-I{here}", str(here / f"{name}.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    emulator = [] if IS_ARM else ["qemu-aarch64", "-cpu", "max"]
    result = subprocess.run([*emulator, str(program)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "0 differ\n")


@needs_compiler
def test_a_row_of_a_block_takes_64_dot_products(tmp_path):
    arguments = "const PackedFour*, int64_t, const uint32_t*, const float*, float*"
    tile = f"template void multiply_packed_tile<1, false, PackedFour>({arguments});"
    tile = f"namespace pass_ext::neon_dot {{ {tile} }}\n"
    kernels = '#include "cpu/linear.h"\n#define PASS_EXT_KERNELS "cpu/linear_packed-inl.h"\n#include "cpu/each_isa.h"\n'
    code = tmp_path / "code.s"
    command = [COMPILER, *FLAGS, "-O3", "-S", "-x", "c++", "-", "-o", str(code)]
    subprocess.run(command, input=kernels + tile, text=True, check=True)
    body = re.search(r"\n_ZN8pass_ext8neon_dot\d+multiply_packed_tile.*?\n\t\.size\t", code.read_text(), re.DOTALL)
    assert body is not None
    instructions = re.findall(r"\n\t([a-z][a-z0-9.]*)\t", body[0])
    assert instructions.count("sdot") == 64
    assert len(instructions) <= 261, "a tenth of what the portable level took when its loops were unrolled"


@needs_compiler
def test_every_file_of_the_library_compiles(tmp_path):
    torch_headers = ["-isystem", str(Path(torch.__file__).parent / "include")]
    target = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_EXTENSION_NAME=pass_ext", "-fvisibility=hidden"]
    flags = [*FLAGS, *target, *torch_headers, "-O0", "-S", "-o", str(tmp_path / "code.s")]
    sources = [ROOT / "csrc" / "schema.cpp", *sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))]
    failed = {}
    for source in sources:
        result = subprocess.run([COMPILER, *flags, str(source)], capture_output=True, text=True)
        if result.returncode:
            failed[source.name] = result.stderr
    assert failed == {}

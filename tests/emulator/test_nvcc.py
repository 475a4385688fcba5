"""The emulator's own test kernels are CUDA too: nvcc compiles them against the real primitives, so both headers agree."""

import os
import shutil
import subprocess

import pytest
from support.native import ROOT

HERE = ROOT / "tests" / "emulator"


def find_nvcc():
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return next((p for home in homes if (p := shutil.which("nvcc", path=f"{home}/bin"))), None) or shutil.which("nvcc")


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("name", ["primitives.cpp", "planted_faults.cpp"])
def test_nvcc_compiles_kernels_and_launches(name, tmp_path):
    command = [
        find_nvcc(),
        "-x",
        "cu",
        "-std=c++17",
        "-arch=sm_80",
        f"-I{ROOT / 'csrc'}",
        f"-I{HERE}",
        f"-I{HERE / 'launches'}",
    ]
    result = subprocess.run([*command, "-c", HERE / name, "-o", tmp_path / "out.o"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

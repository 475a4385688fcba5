"""The emulator's own test kernels are CUDA too: nvcc compiles them against the real primitives, so both headers agree."""

import os
import re
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
    ]
    result = subprocess.run([*command, "-c", HERE / name, "-o", tmp_path / "out.o"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


KERNEL = re.compile(r"^PASS_EXT_KERNEL\b(?P<head>.*?)\s\{\n(?P<body>.*?)^\}", re.M | re.S)


@pytest.mark.parametrize("path", sorted((ROOT / "csrc" / "cuda").glob("*.cuh")), ids=lambda path: path.name)
def test_every_kernel_waits_for_the_launch_in_front(path):
    """Launches begin early on sm_90: without the call a kernel would read what the one in front still writes."""
    for kernel in KERNEL.finditer(path.read_text()):
        large = re.findall(r"PASS_EXT_PARAMETER\s+[\w:<>, ]+?\s(\w+)(?=[,)])", kernel["head"])
        calls = re.findall(r"^  begin_kernel\((.*?)\);", kernel["body"], re.M)
        assert len(calls) == 1, kernel["head"]
        if path.name == "linear_kernel.cuh":  # reads weights first, if nothing under way writes them
            assert kernel["body"].count("if (!problem.are_weights_ready) begin_kernel(problem);\n") == 1
        else:
            assert kernel["body"].lstrip().startswith(f"begin_kernel({', '.join(large)});"), kernel["head"]

"""The CUDA toolkit that setup.py compiles with: its nvcc, and the GPU architectures to compile for.

PASS_EXT_CUDA   auto      nvcc, if there is one (the default)
                1         nvcc; an error if there is none
                0         no CUDA
                native    nvcc, for the GPUs of this machine alone; no CUDA if there is none, or if torch has no CUDA
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

DEFAULT_ARCHITECTURES = "8.0 8.6 8.9 9.0 10.0 12.0+PTX"
OLDEST = (8, 0)  # the kernels use bfloat16 instructions that older GPUs lack


def cuda_wish() -> str:
    """The value of PASS_EXT_CUDA."""
    wish = os.environ.get("PASS_EXT_CUDA", "auto")
    if wish not in ("auto", "1", "0", "native"):
        raise SystemExit(f"pass_ext: PASS_EXT_CUDA must be auto, 1, 0 or native, got {wish!r}")
    return wish


def find_nvcc() -> str | None:
    """The path of nvcc; None if there is none, or if PASS_EXT_CUDA=0."""
    wish = cuda_wish()
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = next((p for home in homes if (p := shutil.which("nvcc", path=f"{home}/bin"))), None) or shutil.which("nvcc")
    if wish == "1" and nvcc is None:
        raise SystemExit(
            "pass_ext: PASS_EXT_CUDA=1, but no nvcc was found. Either\n"
            "  install the CUDA toolkit (12.8 or newer) and put nvcc on PATH,\n"
            "  or set CUDA_HOME to the folder whose bin/ holds nvcc,\n"
            "  or set PASS_EXT_CUDA=0 for a CPU-only build."
        )
    return None if wish == "0" else nvcc


def version_of(nvcc: str) -> str:
    """The toolkit's version, such as "12.8"."""
    output = subprocess.check_output([nvcc, "-V"], text=True)
    match = re.search(r"release ([\d.]+)", output)
    if match is None:
        raise SystemExit(f"pass_ext: {nvcc} -V must name its release, got {output!r}")
    return match[1]


def choose_architectures(nvcc: str, torch: Path) -> list[str]:
    """TORCH_CUDA_ARCH_LIST; without it, those of the default list that nvcc knows, the newest of them also as PTX.

    native: without TORCH_CUDA_ARCH_LIST, those of the GPUs here. Empty, with or without it, where a CUDA library could not run.
    """
    known = set(re.findall(r"compute_(\d+)", subprocess.check_output([nvcc, "--list-gpu-arch"], text=True)))
    wished = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if cuda_wish() == "native":
        here = [arch for arch in native_architectures(torch) if arch.replace(".", "") in known]
        wished = here and (wished or here)
    elif not wished:
        usable = [a for a in DEFAULT_ARCHITECTURES.split() if a.removesuffix("+PTX").replace(".", "") in known]
        return [a.removesuffix("+PTX") for a in usable[:-1]] + [usable[-1].removesuffix("+PTX") + "+PTX"]
    for arch in wished:
        number = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", arch)
        if number is None or number[1] + number[2] not in known:
            names = ", ".join(sorted(known, key=int))
            raise SystemExit(f"pass_ext: TORCH_CUDA_ARCH_LIST names {arch!r}; {nvcc} knows {names}")
    return wished


def native_architectures(torch: Path) -> list[str]:
    """Those of the GPUs here that pass_ext supports; empty for a torch without CUDA."""
    program = shutil.which("nvidia-smi")
    if program is None or not (torch / "lib" / "libtorch_cuda.so").exists():
        return []
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    gpus = {(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d)$", said, re.MULTILINE)}
    return [f"{major}.{minor}" for major, minor in sorted(gpus) if (major, minor) >= OLDEST]


def covers(built: list[str], wished: list[str]) -> bool:
    """True if a library for the architectures ``built`` holds machine code for all of ``wished``."""
    return {a.removesuffix("+PTX") for a in wished} <= {a.removesuffix("+PTX") for a in built}


def gencode(arch: str) -> str:
    """The nvcc option for one architecture: machine code, and PTX if the name asks for it."""
    number = arch.removesuffix("+PTX").replace(".", "")
    codes = [f"sm_{number}"] + ([f"compute_{number}"] if arch.endswith("+PTX") else [])
    return " ".join(f"-gencode=arch=compute_{number},code={code}" for code in codes)

"""Builds the two libraries of pass_ext with ninja: _C.so (schemas, CPU) and, where nvcc is, _C_cuda.so (CUDA only).

Both use LibTorch's stable ABI at target 2.10 and no Python symbol: one py3-none wheel for every Python, torch >= 2.10.
Environment: PASS_EXT_CUDA, TORCH_CUDA_ARCH_LIST (both: csrc/build/toolkit.py), MAX_JOBS, DEBUG=1,
SANITIZE=address,undefined|thread (the CPU library alone, in a folder of its own: see tests/sanitize).
Everything else is in pyproject.toml.

A stale CUDA library is deleted before anything is compiled. PASS_EXT_CUDA=native leaves one alone that has code for the GPUs
here and that building again would not change.
"""

import importlib.util
import os
import runpy
import sys
import time
from pathlib import Path

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:  # older ones lack bdist_wheel, or do not know pyproject's licence
    raise SystemExit(
        f"pass_ext: building needs setuptools>=77, got {setuptools.__version__}: pip install -U setuptools, or drop "
        "--no-build-isolation"
    )

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "csrc" / "build"))

from ninja_build import Ninja, build_file, find_ninja, quote  # noqa: E402
from toolkit import choose_architectures, covers, cuda_wish, find_nvcc, gencode, version_of  # noqa: E402

TORCH_TARGET = "0x020a000000000000"  # the oldest torch that may load the libraries: 2.10
LONGEST = "csrc/cpu/attention.cpp"  # of all; it begins first, so that it does not compile alone at the end
CPU_SOURCES = ["csrc/schema.cpp", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/cpu/*.cpp"))]
CPU_SOURCES.sort(key=LONGEST.__ne__)
CUDA_SOURCES = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/cuda/*.cu"))
# Compiled as one, the last with the others in front: torch's headers take nvcc six seconds, most of these files less.
CUDA_JOINED = [
    "adapter tree debug", "convolution cache", "quantize lookahead", "recurrent state", "step shard recall", "next draft",
]  # fmt: skip
HEADERS = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/*/*.*h"))
DEBUG = os.environ.get("DEBUG", "0") == "1"
SANITIZE = os.environ.get("SANITIZE", "")
FLAGS = "-O0 -g" if DEBUG else "-O1 -g" if SANITIZE else "-O3 -DNDEBUG"
if SANITIZE:
    # Without the pass esra, in which GCC 12.2 has an internal error on csrc/cpu/attention.cpp.
    FLAGS += f" -fno-tree-sra -fno-omit-frame-pointer -fsanitize={SANITIZE} -fno-sanitize-recover=all"


def find_torch() -> Path:
    """The folder of the torch package, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("pass_ext: building needs torch>=2.10: pip install torch, or drop --no-build-isolation")
    return Path(spec.origin).parent


def cpu_build(torch: Path, library: Path) -> str:
    """build.ninja of _C.so."""
    cxx, quiet = os.environ.get("CXX", "g++"), "-Wno-maybe-uninitialized -Wno-uninitialized"  # GCC 12's AVX-512 headers
    return build_file(
        ROOT,
        f"{cxx} {shared_flags(torch)} {' '.join(map(quote, host_flags(torch)))} -Wextra {quiet} -MMD -MF $out.d -c $in -o $out",
        f"{cxx} {FLAGS} -shared -L{quote(torch)}/lib -Wl,--exclude-libs,ALL $in -o $out -ltorch_cpu",
        CPU_SOURCES,
        library,
    )


def cuda_build(torch: Path, library: Path, nvcc: str, architectures: list[str]) -> str:
    """build.ninja of _C_cuda.so."""
    flags = ",".join(quote(f'"{flag}"') for flag in host_flags(torch))  # twice: nvcc's own shell gets them too
    names = " ".join(architectures)
    return build_file(
        ROOT,
        f"{quote(nvcc)} {shared_flags(torch)} -fmad=false -DUSE_CUDA -DPASS_EXT_CUDA_ARCHITECTURES='\"{names}\"'"
        f" -Xcompiler={flags} {' '.join(map(gencode, architectures))} {'-G' if DEBUG else ''}"
        " --threads $${NVCC_THREADS:-1} -MMD -MF $out.d $before -c $in -o $out",
        # libtorch.so pulls in libtorch_cuda.so, where the CUDA shim lives; no symbol of its own is named here.
        f"{quote(nvcc)} -shared -L{quote(torch)}/lib --no-device-link -cudart static"
        " -Xlinker --exclude-libs,ALL,--no-as-needed $in -o $out -ltorch -ltorch_cpu",
        CUDA_SOURCES,
        library,
        joined=CUDA_JOINED,
    )


def shared_flags(torch: Path) -> str:
    """The options of both compilers."""
    return (
        f"-std=c++17 -DTORCH_TARGET_VERSION={TORCH_TARGET} -DTORCH_EXTENSION_NAME=pass_ext -I{quote(ROOT)}/csrc"
        f" -isystem {quote(torch)}/include {FLAGS}"
    )


def host_flags(torch: Path) -> list[str]:
    """The options of the C++ compiler, also under nvcc. -ffp-contract=off: the results are those of the formulas as written."""
    maps = [f"-fmacro-prefix-map={folder}/=" for folder in (ROOT, torch / "include")]  # what __FILE__ leaves
    return ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", *maps]


def earlier_architectures(package: Path, version: str | None) -> list[str]:
    """The architectures of the CUDA library that lies in the package; empty if another toolkit built it."""
    file = package / "_build_info.py"
    info = runpy.run_path(str(file)) if file.exists() else {}
    architectures: list[str] = info["architectures"] if info.get("cuda") == version else []
    return architectures


class NinjaBuild(build_ext):
    """Writes a build.ninja for each library and runs it: parallel, and incremental when repeated."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"  # a plain shared object, not a Python module

    def run(self) -> None:
        started = time.perf_counter()
        if SANITIZE and (SANITIZE not in ("address,undefined", "thread") or not self.inplace):
            way = "python setup.py build_ext --inplace"
            raise SystemExit(f"pass_ext: SANITIZE must be address,undefined or thread, for {way}, got {SANITIZE!r}")
        torch, nvcc = find_torch(), None if SANITIZE else find_nvcc()
        package = ROOT / "pass_ext" if self.inplace else Path(self.build_lib).resolve() / "pass_ext"
        work = ROOT / "build" / "inplace" if self.inplace else Path(self.build_temp).resolve()  # kept: incremental
        if SANITIZE:  # never in the way of the ordinary build, nor taken for it
            work = ROOT / "build" / f"sanitize-{SANITIZE.replace(',', '-')}"
            package = work / "pass_ext"
        package.mkdir(parents=True, exist_ok=True)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        ninja, library = find_ninja(), package / "_C_cuda.so"
        cuda = Ninja(ninja, work / "cuda", jobs)
        version, architectures, words = version_of(nvcc) if nvcc else None, [], "no"
        if nvcc:
            architectures = choose_architectures(nvcc, torch)
            earlier = earlier_architectures(package, version) if self.inplace and cuda_wish() == "native" else []
            if covers(earlier, architectures) and cuda.is_current(cuda_build(torch, library, nvcc, earlier)):
                architectures = earlier
            words = f"yes (nvcc {version}, architectures {' '.join(architectures)})"
        text = cuda_build(torch, library, nvcc, architectures) if nvcc and architectures else ""
        if not text:
            version, words = None, "no (no GPU here that torch and nvcc could use)" if nvcc else "no"
        if not cuda.is_current(text):
            library.unlink(missing_ok=True)  # stale; if this build fails or is interrupted, nothing may load it
        print(f"pass_ext: CPU yes; CUDA {words}", flush=True)
        Ninja(ninja, work, jobs).run(cpu_build(torch, package / "_C.so"))
        if text:
            cuda.run(text, NVCC_THREADS=str(min(jobs, len(architectures))))
        info = {"cuda": version, "architectures": architectures, "torch_target": "2.10", "debug": DEBUG}
        info["sanitize"] = SANITIZE
        lines = "".join(f"{name} = {value!r}\n" for name, value in info.items())
        (package / "_build_info.py").write_text(f'"""Written by setup.py."""\n\n{lines}'.replace("'", '"'))
        print(f"pass_ext: built in {time.perf_counter() - started:.1f} s with {jobs} jobs", flush=True)


class AnyPythonWheel(bdist_wheel):
    """No Python symbol inside: one wheel for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("pass_ext._C", [*CPU_SOURCES, *CUDA_SOURCES], depends=HEADERS)],
    cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AnyPythonWheel},
)

"""Builds the two libraries of pass_ext with ninja: _C.so (schemas, CPU) and, where nvcc is, _C_cuda.so (CUDA only).

Both use LibTorch's stable ABI at target 2.10 and no Python symbol: one py3-none wheel for every Python, torch >= 2.10.
Environment: PASS_EXT_CUDA=auto|1|0, TORCH_CUDA_ARCH_LIST, MAX_JOBS, DEBUG=1, SANITIZE=address,undefined|thread (the CPU
library alone, in a folder of its own: see tests/sanitize). Everything else is in pyproject.toml.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
TORCH_TARGET = "0x020a000000000000"  # the oldest torch that may load the libraries: 2.10
DEFAULT_ARCHITECTURES = "8.0 8.6 8.9 9.0 10.0 12.0+PTX"
CPU_SOURCES = ["csrc/schema.cpp", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/cpu/*.cpp"))]
CUDA_SOURCES = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/cuda/*.cu"))
HEADERS = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/*/*.*h"))
DEBUG = os.environ.get("DEBUG", "0") == "1"
SANITIZE = os.environ.get("SANITIZE", "")
# Not -O1 or -O2: GCC 12.2 ends in an internal compiler error there on csrc/cpu/attention.cpp (pass esra, in weigh).
FLAGS = "-O0 -g" if DEBUG or SANITIZE else "-O3 -DNDEBUG"
if SANITIZE:
    FLAGS += f" -fno-omit-frame-pointer -fsanitize={SANITIZE} -fno-sanitize-recover=all"


def find_torch() -> Path:
    """The folder of the torch package, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("pass_ext: building needs torch>=2.10: pip install torch, or drop --no-build-isolation")
    return Path(spec.origin).parent


def find_nvcc() -> str | None:
    """The nvcc that PASS_EXT_CUDA allows; `auto` means: if there is one."""
    wish = os.environ.get("PASS_EXT_CUDA", "auto")
    if wish not in ("auto", "1", "0"):
        raise SystemExit(f"pass_ext: PASS_EXT_CUDA must be auto, 1 or 0, got {wish!r}")
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


def choose_architectures(nvcc: str) -> list[str]:
    """TORCH_CUDA_ARCH_LIST, or those of the default list that this nvcc knows; the newest of these also as PTX."""
    known = set(re.findall(r"compute_(\d+)", subprocess.check_output([nvcc, "--list-gpu-arch"], text=True)))
    wished = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not wished:
        usable = [a for a in DEFAULT_ARCHITECTURES.split() if a.removesuffix("+PTX").replace(".", "") in known]
        return [a.removesuffix("+PTX") for a in usable[:-1]] + [usable[-1].removesuffix("+PTX") + "+PTX"]
    for arch in wished:
        number = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", arch)
        if number is None or number[1] + number[2] not in known:
            names = ", ".join(sorted(known, key=int))
            raise SystemExit(f"pass_ext: TORCH_CUDA_ARCH_LIST names {arch!r}; {nvcc} knows {names}")
    return wished


def gencode(arch: str) -> str:
    """The nvcc option for one architecture: machine code, and PTX where that is wished."""
    number = arch.removesuffix("+PTX").replace(".", "")
    codes = [f"sm_{number}"] + ([f"compute_{number}"] if arch.endswith("+PTX") else [])
    return " ".join(f"-gencode=arch=compute_{number},code={code}" for code in codes)


def quote(path: object) -> str:
    """A path inside a command of build.ninja."""
    return shlex.quote(str(path)).replace("$", "$$")


def escape(path: object) -> str:
    """A path that build.ninja names as a file to make or to make it from."""
    return re.sub(r"[$ :]", r"$\g<0>", str(path))


class NinjaBuild(build_ext):
    """Writes one build.ninja for both libraries and runs it: parallel, and incremental when repeated."""

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
        work.mkdir(parents=True, exist_ok=True)
        package.mkdir(parents=True, exist_ok=True)
        architectures = choose_architectures(nvcc) if nvcc else []
        names = " ".join(architectures)
        version = re.search(r"release ([\d.]+)", subprocess.check_output([nvcc, "-V"], text=True))[1] if nvcc else None
        cuda = f"yes (nvcc {version}, architectures {names})" if nvcc else "no"
        print(f"pass_ext: CPU yes; CUDA {cuda}", flush=True)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        include = f"-I{quote(ROOT)}/csrc -isystem {quote(torch)}/include"
        common = f"-std=c++17 -DTORCH_TARGET_VERSION={TORCH_TARGET} {include} {FLAGS}"
        hidden = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall"]  # what is written is what is computed
        hidden += [f"-fmacro-prefix-map={folder}/=" for folder in (ROOT, torch / "include")]  # what __FILE__ leaves
        quiet = "-Wno-maybe-uninitialized -Wno-uninitialized"  # GCC 12's own AVX-512 headers
        lineinfo = " -lineinfo" if os.environ.get("PASS_EXT_LINEINFO") == "1" else ""  # source lines for profilers
        link, cxx = f"-shared -L{quote(torch)}/lib", os.environ.get("CXX", "g++")
        rules = [
            "rule cxx\n  deps = gcc\n  depfile = $out.d\n  description = compile $in\n"
            f"  command = {cxx} {common} {' '.join(map(quote, hidden))} -Wextra {quiet} -MMD -MF $out.d -c $in -o $out\n",
            "rule link\n  description = link $out\n"
            f"  command = {cxx} {FLAGS} {link} -Wl,--exclude-libs,ALL $in -o $out -ltorch_cpu\n",
        ]
        libraries = {"_C.so": ("cxx", "link", CPU_SOURCES)}
        if nvcc:
            quoted = [quote(f'"{flag}"') for flag in hidden]  # twice: nvcc hands them on through a shell of its own
            libraries["_C_cuda.so"] = ("nvcc", "link_cuda", CUDA_SOURCES)
            rules += [
                "rule nvcc\n  deps = gcc\n  depfile = $out.d\n  description = compile $in\n"
                f"  command = {quote(nvcc)} {common} -fmad=false -DUSE_CUDA -DPASS_EXT_CUDA_ARCHITECTURES='\"{names}\"'"
                f" -Xcompiler={','.join(quoted)} --threads {min(jobs, len(architectures))}"
                f" {' '.join(map(gencode, architectures))} {'-G' if DEBUG else ''}{lineinfo} -MMD -MF $out.d -c $in -o $out\n",
                # libtorch.so pulls in libtorch_cuda.so, where the CUDA shim lives; no symbol of its own is named here.
                "rule link_cuda\n  description = link $out\n"
                f"  command = {quote(nvcc)} {link} --no-device-link -cudart static -Xlinker --exclude-libs,ALL,--no-as-needed"
                " $in -o $out -ltorch -ltorch_cpu\n",
            ]
        else:
            (package / "_C_cuda.so").unlink(missing_ok=True)  # of an earlier build in the same folder
        edges = []
        for library, (compile_rule, link_rule, sources) in libraries.items():
            objects = [f"{source}.o" for source in sources]
            edges += [f"build {o}: {compile_rule} {escape(ROOT / s)}" for o, s in zip(objects, sources, strict=True)]
            edges.append(f"build {escape(package / library)}: {link_rule} {' '.join(objects)}")
        (work / "build.ninja").write_text("\n".join([*rules, *edges, ""]))
        ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if ninja is None:
            raise SystemExit("pass_ext: building needs ninja: pip install ninja")
        subprocess.run([ninja, "-C", str(work), f"-j{jobs}"], check=True)

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

"""The requirements of the two built libraries: torch's stable ABI from 2.10 on, no Python, no CUDA runtime beside them, any
x86-64 processor, the GPU architectures they were built for, and no trace of the folder they were built in.

Also: the sdist holds all that git tracks. Needs binutils.
"""

import importlib
import json
import platform
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from support.paths import ROOT

import pass_ext

PACKAGE = Path(pass_ext.__file__).parent
CPU, CUDA = PACKAGE / "_C.so", PACKAGE / "_C_cuda.so"
DEBUG = importlib.import_module("pass_ext._build_info").debug

no_cuda_library = pytest.mark.skipif(not CUDA.exists(), reason="this build has no _C_cuda.so (nvcc was not found)")
built_for_one_gpu = pytest.mark.skipif(
    len(pass_ext.status().cuda_architectures) == 1,
    reason="TORCH_CUDA_ARCH_LIST named one architecture: a private build",
)
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
either_library = pytest.mark.parametrize(
    "library", [CPU, pytest.param(CUDA, marks=no_cuda_library)], ids=lambda p: p.name
)


def read(tool, *arguments):
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} (binutils) here")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def needed(library):
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", read("readelf", "-d", library)))


# ---- ABI ----


@either_library
def test_no_python_symbol_is_defined_or_used(library):
    symbols = [line.split()[-1] for line in read("nm", "-D", library).splitlines()]
    assert any(symbol.startswith("torch_") for symbol in symbols), "nm reads the table"
    assert [symbol for symbol in symbols if symbol.lstrip("_").startswith("Py")] == []


@either_library
def test_only_torchs_stable_symbols_are_used_and_2_10_has_them_all(library):
    pytest.importorskip("torch_abi_audit", reason="torch-abi-audit is in the extra pass_ext[dev]")
    command = [sys.executable, "-c", "import sys; from torch_abi_audit.cli import main; sys.exit(main())", "--json"]
    said = subprocess.run([*command, str(library)], capture_output=True, text=True, check=True).stdout
    (report,) = json.loads(said)["bundled_libs"]
    assert report["error"] is None
    assert report["torch"]["uses_torch"]
    assert report["torch"]["unstable_symbols"] == []
    assert report["torch"]["unknown_shim_symbols"] == []
    assert report["torch"]["stable"]
    assert report["torch"]["min_torch_version"] == "2.10.0"


@either_library
def test_only_libraries_that_torch_or_every_linux_brings_are_needed(library):
    system = {
        f"lib{name}" for name in ("stdc++.so.6", "m.so.6", "gcc_s.so.1", "c.so.6", "dl.so.2", "rt.so.1", "pthread.so.0")
    }
    loader = {name for name in needed(library) if name.startswith("ld-linux")}
    torch_libraries = {"libtorch_cpu.so"} | ({"libtorch.so"} if library == CUDA else set())
    assert needed(library) - system - loader == torch_libraries


# The newest versions in manylinux_2_28, by the policies of auditwheel 6; the CUDA library has them where CUDA wheels are built.
FLOOR = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


def versions_needed(library):
    """The newest version of each system library that a shared library asks for."""
    needs = read("readelf", "-V", library).partition("Version needs section")[2]
    found = re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)+)", needs)
    numbers = [(name, tuple(map(int, version.split(".")))) for name, version in found]
    return {name: max(n for other, n in numbers if other == name) for name, _ in numbers}


def test_the_cpu_library_asks_for_no_more_than_manylinux_2_28_has():
    """A name that a newer compiler or Linux brings in needs a line in csrc/cpu/old_linux.cpp."""
    needed = versions_needed(CPU)
    assert {"GLIBC", "GLIBCXX"} <= set(needed), "readelf reads the table"
    assert {name: version for name, version in needed.items() if version > FLOOR[name]} == {}


@no_cuda_library
def test_the_cuda_library_asks_for_no_more_than_manylinux_2_34_has():
    """The release builds it on manylinux_2_28 itself; here, nvcc's static runtime takes the names of this machine's glibc."""
    needed = versions_needed(CUDA)
    floor = FLOOR | {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29)}
    assert {name: version for name, version in needed.items() if version > floor[name]} == {}


def test_only_the_switches_of_the_loader_are_exported():
    """A name of csrc/cpu/old_linux.cpp that others could find, such as log, would be theirs too."""
    exported = [line.split()[-1] for line in read("nm", "-D", CPU).splitlines() if line.split()[-2] == "T"]
    assert exported and [name for name in exported if not name.startswith("pass_ext_")] == []


@either_library
@pytest.mark.skipif(DEBUG, reason="a DEBUG=1 build names its sources")
def test_no_trace_of_the_build_folder(library):
    content = library.read_bytes()
    traces = (str(ROOT), str(Path(torch.__file__).parent), "site-packages")
    assert [trace for trace in traces if trace.encode() in content] == []
    assert b"csrc/" in content, "__FILE__ leaves relative paths after"


# ---- processors ----


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets are those of x86-64")
@either_library
def test_only_functions_of_the_avx_namespaces_use_avx(library):
    """The linker could pick a standard-library template compiled for AVX-512 by accident for the whole library."""
    ours = re.compile(r"_ZZ?NK?8pass_ext(4avx2|6avx512|11avx512_bf16)")
    users, function = {}, ""
    for line in read("objdump", "-d", "--no-show-raw-insn", library).splitlines():
        if line.endswith(">:"):
            function = line.split("<")[1][:-2]
        elif "\t" in line:
            instruction = line.split("\t")[1]
            if instruction.startswith("v") or re.search(r"%[yz]mm|%k[0-7]", instruction):
                users.setdefault(function, instruction)
    assert {name: first for name, first in users.items() if not ours.match(name)} == {}
    if library == CPU:
        namespaces = {match[1] for name in users if (match := ours.match(name))}
        assert namespaces == {"4avx2", "6avx512", "11avx512_bf16"}, "the test sees the kernels"


def gpu_code(library):
    """(kind, architecture) of all GPU code in a library: the entries of its fat binaries, which begin with ba55ed50."""
    content, position, found = library.read_bytes(), 0, set()
    while (position := content.find(struct.pack("<IHH", 0xBA55ED50, 1, 16), position)) >= 0:
        end = position + 16 + struct.unpack_from("<Q", content, position + 8)[0]
        position += 16
        while position < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", content, position)
            (architecture,) = struct.unpack_from("<I", content, position + 28)
            found.add(({1: "ptx", 2: "cubin"}.get(kind, kind), architecture))
            position += header + size
    return found


def number(architecture):
    return int(re.match(r"(\d+)\.(\d)", architecture).expand(r"\1\2"))


@no_cuda_library
def test_the_cuda_library_holds_code_for_exactly_the_architectures_it_names():
    architectures = pass_ext.status().cuda_architectures
    cubins = {("cubin", number(a)) for a in architectures}
    ptx = {("ptx", number(a)) for a in architectures if a.endswith("+PTX")}
    assert gpu_code(CUDA) == cubins | ptx


@no_cuda_library
@built_for_one_gpu
def test_newer_gpus_find_ptx_of_the_newest_architecture():
    newest = max(pass_ext.status().cuda_architectures, key=number)
    assert newest.endswith("+PTX")
    assert ("ptx", number(newest)) in gpu_code(CUDA)


@no_cuda_library
@built_for_one_gpu
def test_the_build_covers_ampere_hopper_and_blackwell():
    status = pass_ext.status()
    nvcc = tuple(map(int, status.cuda_compiler.split(".")))
    wanted = {80, 90, 100} if nvcc >= (12, 8) else {80, 90}
    assert wanted <= {number(a) for a in status.cuda_architectures}


# ---- sources ----


def test_shipped_weights_come_with_a_card_and_nothing_else():
    """Records and pictures, which nobody needs to run them, lie in benchmarks/results/pretrained."""
    files = {file.name for file in (PACKAGE / "modules" / "pretrained").iterdir()}
    names = {name.removesuffix(".safetensors") for name in files if name.endswith(".safetensors")}
    assert names and files == {f"{name}{end}" for name in names for end in (".safetensors", ".md")}


@needs_git
def test_shipped_weights_have_a_record_and_a_picture_with_text():
    folder = ROOT / "benchmarks" / "results" / "pretrained"
    for weights in (PACKAGE / "modules" / "pretrained").glob("*.safetensors"):
        facts = json.loads((folder / f"{weights.stem}.json").read_text())
        picture = (folder / f"{weights.stem}.svg").read_text()
        assert len(facts["losses"]) == facts["steps"] and ">loss</text>" in picture


def tracked_files(*folders):
    """The files that git tracks, and those that it will track once committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders],
        capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout  # fmt: skip
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


@needs_git
def test_the_sdist_holds_every_file_that_git_tracks(tmp_path):
    pytest.importorskip("build", reason="build is in the extra pass_ext[dev]")
    for name in tracked_files():
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, tmp_path / "checkout"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    assert (
        set(tracked_files("csrc", "pass_ext", "tests", "setup.py", "pyproject.toml", "LICENSE", "README.md")) <= inside
    )
    assert [name for name in inside if name.endswith((".so", ".o", ".pyc", "_build_info.py"))] == []

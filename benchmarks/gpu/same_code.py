"""Shows that kernel files whose text changed compile to the code of an earlier commit, and writes a record of it.

    a file has the same code  =  every .cu that includes it compiles to the same kernels and the same functions of the host

`python -m benchmarks.gpu.same_code COMMIT` needs nvcc and no GPU. Each .cu whose text or headers changed since COMMIT
is compiled at both, for sm_90. A kernel is the same if its machine code, constants, parameters, registers, stack and shared
memory are; a function of the host if its instructions and constants are, whatever the numbers of its labels. Tables must be the
same too, in the GPU's memory and in the host's. gpu_status reads the record,
benchmarks/results/kernel-code/same-code-<commit>.json: what a GPU verified about a file of COMMIT holds for its new text.
Commit csrc/ first. `--keep FOLDER` keeps what was compiled for the next call; `--files NAME.cu ...` compares these alone and
writes no record; `--without NAME.cu ...` writes one that says nothing about what these include.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.harness.machine import now
from benchmarks.kernel_code.disassembler import list_kernels, missing_tools
from benchmarks.kernel_code.measure import DETAILED, commit_of_kernels
from benchmarks.pages.gpu_status import SAME_CODE, content_hash, kernel_files, with_headers

OPTIONS = ("-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_EXTENSION_NAME=pass_ext", "-O3", "-DNDEBUG",
           "-fmad=false", "-DUSE_CUDA", '-DPASS_EXT_CUDA_ARCHITECTURES="9.0"', f"-arch={DETAILED}")  # fmt: skip
"""Those of setup.py, as tests/measurement/test_gpu_status.py holds."""
HOST_OPTIONS = "-fPIC,-fvisibility=hidden,-ffp-contract=off,-S"
MADE_BY_NVCC = re.compile(r"_GLOBAL__sub_I|(?:_ZZ?L\d+)?__(?:sti____cuda|nv_|cuda|fatDeviceText)")
"""The beginnings of names of functions and data that register all kernels of a file at once, or begin its globals."""
DATA = re.compile(r"\.(?:string|ascii|long|quad|byte|value|zero)\b")


@dataclass(frozen=True)
class Unit:
    """What a .cu compiles to: name -> digest, of its kernels and their tables, and of its functions and data on the host."""

    kernels: dict[str, str]
    host: dict[str, str]

    def differences(self, other: Unit) -> list[str]:
        """The names of kernels and functions that are not the same in both."""
        pairs = ((self.kernels, other.kernels), (self.host, other.host))
        return sorted(n for mine, yours in pairs for n in {*mine, *yours} if mine.get(n) != yours.get(n))


def compile_unit(source: Path, root: Path, keep: Path) -> Unit:
    """Compiles csrc/cuda/<name>.cu of a tree, unless `keep` has the result of the same text and headers."""
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(f"{OPTIONS} {HOST_OPTIONS} {version}".encode()).hexdigest()[:8]
    kept = keep / f"{source.stem}-{content_hash(source, root)}-{key}.json"
    if kept.exists():
        return Unit(**json.loads(kept.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        unit = _compile(source, root, Path(folder))
    kept.write_text(json.dumps(asdict(unit), indent=1))
    return unit


def _compile(source: Path, root: Path, folder: Path) -> Unit:
    include = Path(torch.__file__).parent / "include"
    maps = ",".join(f"-fmacro-prefix-map={path}/=" for path in (root, include))
    command = ["nvcc", *OPTIONS, f"-I{root}/csrc", "-isystem", str(include), f"-Xcompiler={HOST_OPTIONS},{maps}"]
    # -S under -c: the host's compiler leaves assembly. --keep: the cubin stays.
    command += ["--keep", f"--keep-dir={folder}", "-c", str(source), "-o", str(folder / "host.s")]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    (cubin,) = folder.glob("*.cubin")
    (folder / "extracted").mkdir()
    kernels = kernels_of(cubin, folder / "extracted")
    host = {name: _digest(text.encode()) for name, text in host_code((folder / "host.s").read_text()).items()}
    return Unit(kernels, host)


def kernels_of(cubin: Path, folder: Path) -> dict[str, str]:
    """Symbol -> digest of the machine code, constants, parameters and resources of a kernel; section -> digest of tables that
    all kernels share. `folder` must be empty.
    """
    sections = _sections(cubin.read_bytes())
    links = _links(cubin)
    tables = [name for name in (".nv.constant3", ".nv.constant4", ".nv.global.init") if name in sections]
    kernels = {name: _digest(sections[name], links.get(name, b"")) for name in tables}
    for kernel in list_kernels(cubin, folder):
        parts = [f"{kernel.registers} {kernel.stack} {kernel.shared}".encode(), sections[f".text.{kernel.symbol}"]]
        parts += [sections.get(f".nv.constant2.{kernel.symbol}", b""), _info(sections[f".nv.info.{kernel.symbol}"])]
        parts += [links.get(f"{section}.{kernel.symbol}", b"") for section in (".text", ".nv.constant2")]
        kernels[_without_hash(kernel.symbol)] = _digest(*parts)
    return kernels


def _info(section: bytes) -> bytes:
    """A kernel's .nv.info without the index of a symbol in the table of all: its parameters, limits, exits."""
    known, at = b"", 0
    while at < len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        end = at + 4 + (size if form == 4 else 0)  # 4: `size` bytes follow; else that field is the value
        has_index = (form, attribute) == (4, 0x0A)  # EIATTR_PARAM_CBANK
        known += section[at : at + 4] + section[at + (8 if has_index else 4) : end]
        at = end
    return known


def _links(cubin: Path) -> dict[str, bytes]:
    """Section -> its addresses of functions and tables: offset, kind, name."""
    listed = subprocess.run(["readelf", "-rW", cubin], capture_output=True, text=True, check=True).stdout
    links = {}
    for part in listed.split("Relocation section '.rela")[1:]:
        found = re.findall(r"^([0-9a-f]{16})  [0-9a-f]{8}([0-9a-f]{8}) .* (\S+ [+-] \w+)$", part, flags=re.MULTILINE)
        links[part[: part.index("'")]] = _without_hash("\n".join(map(" ".join, sorted(found)))).encode()
    return links


def _without_hash(name: str) -> str:
    """Symbols without what nvcc adds to the file's name in those of anonymous namespaces: hashes, the number of a process."""
    shorter, at = "", 0
    for found in re.finditer(r"(\d+)(_(?:GLOBAL__N_|INTERNAL))_[0-9a-f]{8}_(\d+)_", name):
        shorter += name[at : found.start()] + found[2] + "_" + name[found.end() : found.end() + int(found[3])]
        at = found.start(2) + int(found[1])  # the identifier has that many characters
    return shorter + name[at:]


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _sections(elf: bytes) -> dict[str, bytes]:
    """Name -> bytes of each section of an ELF file that has bytes."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    count, names = struct.unpack_from("<HH", elf, 60)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + 64 * i) for i in range(count)]
    table = headers[names][4]
    sections = {}
    for name, kind, _, _, offset, size in headers:
        end = elf.index(b"\0", table + name)
        sections[elf[table + name : end].decode()] = b"" if kind == 8 else elf[offset : offset + size]  # 8: NOBITS
    return sections


def host_code(assembly: str) -> dict[str, str]:
    """Name -> instructions of each function, or the bytes of each datum, in GCC's assembly. A local label has the number of its
    first mention in the function; a label of constants is replaced by them.
    """
    constants: dict[str, str] = {}
    code: dict[str, list[str]] = {}
    label = function = ""
    types = dict(re.findall(r"^\s*\.type\s+(\S+), @(function|object)$", assembly, flags=re.MULTILINE))
    for line in map(str.strip, assembly.splitlines()):
        name = line.removesuffix(":")
        if name != line:
            label = name
            if name in types:
                code[name] = []
            if types.get(name) == "function":
                function = name
        elif DATA.match(line):
            if re.match(r"\.LC\d+$", label):
                constants[label] = constants.get(label, "") + line
            elif types.get(label) == "object":
                code[label].append(line)
        elif re.match(r"\.(section|text|data|bss)\b", line):
            label = ""
        elif reserved := re.match(r"\.comm\s+([^,]+),(.*)", line):
            code[reserved[1]] = [reserved[2]]
        if function and not re.match(r"\.(cfi|loc|file|section|text|p2align|align|weak|hidden|globl|type|set)", line):
            code[function].append(line)
        if re.match(rf"\.size\s+{re.escape(function)},", line):
            function = ""
    return {
        _without_hash(name): _renumbered("\n".join(lines), constants)
        for name, lines in code.items()
        if not MADE_BY_NVCC.match(name)
    }


def _renumbered(text: str, constants: Mapping[str, str]) -> str:
    numbers: dict[str, int] = {}

    def replace(match: re.Match[str]) -> str:
        return constants.get(match[0]) or f".{numbers.setdefault(match[0], len(numbers))}"

    return _without_hash(re.sub(r"\.L[A-Z]*\d+", replace, text))


def compare(root: Path, base: Path, keep: Path, names: Iterable[str]) -> dict[str, list[str] | None]:
    """Each .cu of `names` -> what is not the same in both trees, [] if all is; None if it did not exist."""

    def differences(source: Path) -> list[str] | None:
        before = base / source.relative_to(root)
        if not before.exists():
            return None
        if content_hash(source, root) == content_hash(before, base):
            return []
        return compile_unit(before, base, keep).differences(compile_unit(source, root, keep))

    sources = [path for path in sorted((root / "csrc" / "cuda").glob("*.cu")) if path.name in names]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        return {source.name: found for source, found in zip(sources, pool.map(differences, sources), strict=True)}


def describe_files(root: Path, base: Path, found: Mapping[str, list[str] | None]) -> dict[str, Any]:
    """Kernel file whose text or headers changed -> its hash and, if its code is the same, those of the files before it: of
    itself or, where it is new, of those that include it.
    """
    users = {user: with_headers(user, root) for user in (root / "csrc" / "cuda").glob("*.cu*")}
    entries = {}
    for file in kernel_files(root):
        units = [user.name for user, headers in users.items() if user.suffix == ".cu" and file in headers]
        is_same = bool(units) and all(found.get(unit) == [] for unit in units)
        before = {path.name: content_hash(path, base) for path in _before(file, root, base, users)}
        current = content_hash(file, root)
        if is_same and before and before != {file.name: current}:
            entries[file.name] = {"hash": current, "before": before, "units": sorted(units)}
    return entries


def _before(file: Path, root: Path, base: Path, users: Mapping[Path, list[Path]]) -> list[Path]:
    was = base / file.relative_to(root)
    if was.exists():
        return [was]
    around = [user for user, headers in users.items() if user.suffix == ".cuh" and file in headers and user != file]
    known = [user for user in around if (base / user.relative_to(root)).exists()]
    nearest = [user for user in known if not any(other in users[user] for other in known if other != user)]
    return [base / user.relative_to(root) for user in sorted(nearest)]


def make_record(
    root: Path, base: Path, commit: str, found: Mapping[str, list[str] | None], keep: Path
) -> dict[str, Any]:
    """The record that gpu_status reads."""
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    units = {}
    for name, differences in found.items():
        source = root / "csrc" / "cuda" / name
        before = base / source.relative_to(root)
        if differences is None or content_hash(source, root) == content_hash(before, base):
            continue
        unit = compile_unit(source, root, keep)
        units[name] = {"kernels": len(unit.kernels), "host": len(unit.host), "differences": differences}
    release = re.search(r"release ([\d.]+)", version)
    return {
        "date": now(),
        "commit": commit_of_kernels(),
        "base": commit,
        "compiler": f"nvcc {release[1] if release else 'unknown'}",
        "architecture": DETAILED,
        "units": units,
        "kernels": describe_files(root, base, found),
    }


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.same_code`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--keep", type=Path, help="the folder of what was compiled; without it nothing is kept")
    parser.add_argument("--files", nargs="+", default=[], help="names of .cu: compare these, write no record")
    parser.add_argument("--without", nargs="+", default=[], help="names of .cu: compare the others")
    options = parser.parse_args()
    if missing := missing_tools() + ([] if shutil.which("nvcc") else ["nvcc"]):
        print(f"missing: {', '.join(missing)}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        base, keep = Path(folder) / "base", options.keep or Path(folder) / "keep"
        base.mkdir()
        keep.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", options.commit, "csrc"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "x", "-C", base], input=archive.stdout, check=True)
        names = options.files or [path.name for path in (ROOT / "csrc" / "cuda").glob("*.cu")]
        found = compare(ROOT, base, keep, {*names} - {*options.without})
        for name, differences in found.items():
            if differences is None:
                print(f"{name} is new")
            elif differences or options.files:
                print(f"{name} {'differs in ' + ', '.join(differences) if differences else 'is the same'}")
        if options.files:
            return 0
        short = ["git", "rev-parse", "--short=12", options.commit]
        commit = subprocess.run(short, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        record = make_record(ROOT, base, commit, found, keep)
    path = ROOT / SAME_CODE / f"same-code-{record['commit']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(record['kernels'])} changed files have the code of {record['base']}: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Reads the kernels of a compiled CUDA library or cubin, and their instructions, with NVIDIA's cuobjdump and nvdisasm.

Both tools are small packages, in the extra pass_ext[dev], and part of a CUDA toolkit. binutils reads the symbols.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import ROOT
from benchmarks.kernel_code.instructions import Instruction


@dataclass(frozen=True)
class Kernel:
    """A kernel compiled for one architecture. Sizes are in bytes: ``stack`` per thread, ``shared`` per block."""

    name: str
    architecture: str
    registers: int
    stack: int
    shared: int
    code: int
    symbol: str
    index: int
    cubin: Path


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel and the compiler's version, "" if the cubin does not name it."""

    instructions: list[Instruction]
    compiler: str


def find_tool(name: str) -> str | None:
    """The path of cuobjdump or nvdisasm: in the Python package, else on PATH, else in CUDA_HOME."""
    spec = importlib.util.find_spec("nvidia")
    packages = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    installed = [path for folder in packages for path in sorted(Path(folder).glob(f"*/bin/{name}"))]
    if installed:
        return str(installed[-1])
    return shutil.which(name) or shutil.which(name, path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")


def missing_tools() -> list[str]:
    """The needed programs that this machine lacks."""
    missing = [name for name in ("cuobjdump", "nvdisasm") if find_tool(name) is None]
    return missing + [name for name in ("readelf", "c++filt") if shutil.which(name) is None]


def list_kernels(library: Path, folder: Path) -> list[Kernel]:
    """Every kernel of a .so, .o or .cubin, for every architecture. Extracts the cubins into ``folder``, which must be empty."""
    _run("cuobjdump", "-xelf", "all", library.resolve(), cwd=folder)
    kernels: list[Kernel] = []
    for cubin in sorted(folder.glob("*.cubin")):
        symbols = _function_symbols(cubin)
        usage = _run("cuobjdump", "-res-usage", cubin)
        for symbol, *sizes in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage):
            index, code = symbols[symbol]
            registers, stack, shared = map(int, sizes)
            architecture = cubin.name.split(".")[-2]
            kernels.append(Kernel(symbol, architecture, registers, stack, shared, code, symbol, index, cubin))
    names = _readable_names(kernel.symbol for kernel in kernels)
    kernels = [replace(kernel, name=names[kernel.symbol]) for kernel in kernels]
    return sorted(kernels, key=lambda kernel: (kernel.name, kernel.architecture))


def disassemble(kernels: Iterable[Kernel]) -> dict[Kernel, Code]:
    """The code of these kernels. Takes about a second for each megabyte of a cubin."""
    by_cubin: dict[Path, dict[str, Kernel]] = {}
    for kernel in kernels:
        by_cubin.setdefault(kernel.cubin, {})[kernel.symbol] = kernel
    code = {}
    for cubin, by_symbol in by_cubin.items():
        indices = ",".join(str(kernel.index) for kernel in by_symbol.values())
        about, functions = json.loads(_run("nvdisasm", "-json", "-fun", indices, cubin))
        tool = re.search(r"release ([\d.]+)", json.dumps(about.get(".note.nv.tkinfo", "")))
        for function in functions:
            if function["function-name"] in by_symbol:
                kernel = by_symbol[function["function-name"]]
                code[kernel] = Code(read_instructions(function["sass-instructions"]), tool[1] if tool else "")
    return code


def read_instructions(listed: list[dict[str, str]]) -> list[Instruction]:
    """The instructions of one function, from nvdisasm's JSON. The JSON has no addresses; each instruction has 16 bytes."""
    return [
        Instruction(
            16 * i,
            entry["opcode"],
            tuple(filter(None, (operand.strip() for operand in entry.get("operands", "").split(",")))),
            entry.get("predicate", ""),
        )
        for i, entry in enumerate(listed)
    ]


def shorten(name: str) -> str:
    """A demangled name without namespaces, result type and parameters; enumerators have their names."""
    name = re.sub(r"^void ", "", name)
    name = name[: _end_of_name(name)]
    for enum, value in set(re.findall(r"\((?:\w+::)*(\w+)\)(\d+)", name)):
        name = re.sub(rf"\((?:\w+::)*{enum}\){value}\b", _enumerator(enum, int(value)), name)
    return re.sub(r"\b(?:\w+::)+", "", name).replace("> >", ">>")


def _end_of_name(name: str) -> int:
    """The index of the parameter list: the first parenthesis outside of template arguments."""
    depth = 0
    for i, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            return i
    return len(name)


def _enumerator(enum: str, value: int) -> str:
    for header in sorted((ROOT / "csrc").glob("*/*.*h")):
        definition = re.search(rf"enum class {enum}\b[^{{]*\{{([^}}]*)\}}", header.read_text())
        if definition:
            return [name.strip() for name in definition[1].split(",") if name.strip()][value]
    return str(value)


def _readable_names(symbols: Iterable[str]) -> dict[str, str]:
    distinct = sorted(set(symbols))
    lines = subprocess.run(["c++filt"], input="\n".join(distinct), capture_output=True, text=True, check=True).stdout
    return {symbol: shorten(name) for symbol, name in zip(distinct, lines.splitlines(), strict=False)}


def _function_symbols(cubin: Path) -> dict[str, tuple[int, int]]:
    """Symbol -> (index, size)."""
    lines = subprocess.run(["readelf", "-sW", cubin], capture_output=True, text=True, check=True).stdout
    symbols = re.findall(r"^\s*(\d+): \w+\s+(\w+) FUNC .* (\S+)$", lines, flags=re.MULTILINE)
    return {name: (int(index), int(size, 0)) for index, size, name in symbols}


def _run(tool: str, *arguments: object, cwd: Path | None = None) -> str:
    path = find_tool(tool)
    if path is None:
        raise FileNotFoundError(f"{tool} was not found: pip install nvidia-cuda-{tool}, or put a CUDA toolkit on PATH")
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True, cwd=cwd).stdout

"""Measures every kernel of a compiled library: its resources on each architecture, and its instructions on one of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness.machine import now
from benchmarks.kernel_code.control_flow import ControlFlow
from benchmarks.kernel_code.disassembler import Code, Kernel, disassemble, list_kernels
from benchmarks.kernel_code.instructions import count_classes, count_opcodes

DETAILED = "sm_90"
"""The architecture whose instructions are read. The GPU of the project's aims has it."""
MERGED = ("commit_kernel", "embed_kernel", "mask_kernel", "merge_kernel", "merge_splits_kernel", "sum_slots_kernel",
          "sum_table_kernel")  # fmt: skip
"""Kernels whose many kinds differ only in element types: one row shows the largest number of any kind."""


def measure(library: Path) -> dict[str, Any]:
    """The result: commit, compiler, and the numbers of each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        rows: dict[str, list[Kernel]] = {}
        for kernel in list_kernels(library, Path(folder)):
            rows.setdefault(row_of(kernel.name), []).append(kernel)
        code_bytes = Counter[str]()
        for group in rows.values():
            for kernel in group:
                code_bytes[kernel.architecture] += kernel.code
        largest = {
            name: max((k for k in kernels if k.architecture == DETAILED), key=lambda k: k.code, default=None)
            for name, kernels in rows.items()
        }
        code = disassemble(kernel for kernel in largest.values() if kernel)
    kernels: dict[str, Any] = {}
    for name, group in rows.items():
        kernels[name] = {"kinds": len({kernel.name for kernel in group}), "resources": _resources(group)}
        if read := largest[name]:
            kernels[name] |= describe(code[read])
    compilers = sorted({listing.compiler for listing in code.values()} - {""})
    return {
        "date": now(),
        "commit": commit_of_kernels(),
        "compiler": f"nvcc {', '.join(compilers)}" if compilers else "unknown",
        "code": dict(sorted(code_bytes.items(), key=lambda item: _number_of(item[0]))),
        "kernels": kernels,
    }


def row_of(name: str) -> str:
    """The name of a kernel's row. All kinds of a kernel in `MERGED` share a row; else those for bfloat16 and float16 do."""
    function = function_of(name)
    return function if function in MERGED else re.sub(r"\bb?float16\b", "16-bit", name)


def function_of(name: str) -> str:
    """A kernel's name without template arguments."""
    return name.partition("<")[0]


def _resources(group: Iterable[Kernel]) -> dict[str, dict[str, int]]:
    """Architecture -> the largest number of each resource."""
    largest: dict[str, dict[str, int]] = {}
    for kernel in group:
        numbers = {"registers": kernel.registers, "stack": kernel.stack, "shared": kernel.shared, "code": kernel.code}
        known = largest.setdefault(kernel.architecture, numbers)
        largest[kernel.architecture] = {name: max(number, known[name]) for name, number in numbers.items()}
    return dict(sorted(largest.items(), key=lambda item: _number_of(item[0])))


def _number_of(architecture: str) -> int:
    return int(re.sub(r"\D", "", architecture))


def describe(code: Code) -> dict[str, Any]:
    """Counts of a kernel's instructions."""
    fewest, most = ControlFlow(code.instructions).loads_in_flight()
    return {
        "instructions": len(code.instructions),
        "classes": count_classes(code.instructions),
        "opcodes": count_opcodes(code.instructions),
        "loads_in_flight": {"fewest": fewest, "most": most},
    }


def commit_of_kernels() -> str:
    """The last commit that changed the kernels' sources; "-dirty" is added if the tree differs from it."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    commit = git("log", "-1", "--format=%h", "--abbrev=12", "--", "csrc", "setup.py")
    return f"{commit}-dirty" if git("status", "--porcelain", "--", "csrc", "setup.py") else commit

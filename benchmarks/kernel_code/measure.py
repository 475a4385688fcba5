"""Measures every kernel of a compiled library: its resources on each architecture, and its instructions on one of them.

logits of a turn        bytes that the wide loads of a turn bring to a warp / bytes of one logit
instructions per logit  instructions of the work path that a warp issues / those logits
"""

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
from benchmarks.kernel_code.instructions import ARITHMETIC, Instruction, count_classes, count_opcodes

DETAILED = "sm_90"
"""The architecture whose instructions are read. The GPU of the project's aims has it."""
MERGED = ("commit_kernel", "embed_kernel", "mask_kernel", "merge_kernel", "merge_splits_kernel", "sum_slots_kernel",
          "sum_table_kernel")  # fmt: skip
"""Kernels whose many kinds differ only in element types: one row shows the largest number of any kind."""
LOADS_OF_CHUNK = 4
"""Wide loads of a lane for an aligned chunk of a row of 16-bit logits: cuda/row_scan.cuh."""
LANES = 32


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
            kernels[name] |= describe(read.name, code[read])
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


def describe(name: str, code: Code) -> dict[str, Any]:
    """Counts of a kernel's instructions: all of them, and those of its hot part."""
    flow = ControlFlow(code.instructions)
    fewest, most = flow.loads_in_flight()
    loop = flow.hottest_loop()
    path = flow.work_path(loop)
    counts: dict[str, Any] = {
        "instructions": len(code.instructions),
        "classes": count_classes(code.instructions),
        "opcodes": count_opcodes(code.instructions),
        "loads_in_flight": {"fewest": fewest, "most": most},
    }
    moved = LANES * sum(i.width for i in path if i.is_wide_load or i.base == "LDGSTS")
    if moved:
        part = flow.instructions(loop.blocks if loop else flow.own_blocks())
        counts["hot"] = {
            "part": "loop" if loop else "kernel",
            "all": len(part),
            "path": len(path),
            "classes": count_classes(path),
            "opcodes": count_opcodes(path),
            "bytes": moved,
        }
        computes = loop is None or 2 * _arithmetic(part) >= _arithmetic(code.instructions)
        if computes and (element := bytes_of_logit(name)):
            counts["hot"] |= {"logits": moved // element, "bytes_per_logit": element}
    if function_of(name).startswith("scan") and (scan := scan_of(flow.path_with_loads(LOADS_OF_CHUNK))):
        counts["scan"] = scan
    return counts


def scan_of(path: list[Instruction]) -> dict[str, int]:
    """The instructions of a path through a scan: before its first wide load, and from there to the last 2^x of the sum."""
    loads = [i for i, instruction in enumerate(path) if instruction.is_wide_load]
    powers = [i for i, instruction in enumerate(path) if instruction.opcode.startswith("MUFU.EX2")]
    return {"way_in": loads[0], "work": powers[-1] + 1 - loads[0]} if loads and powers else {}


def _arithmetic(instructions: list[Instruction]) -> int:
    return sum(instruction.base in ARITHMETIC for instruction in instructions)


def bytes_of_logit(name: str) -> int | None:
    """Bytes of a logit in a kernel that scans rows; None for other kernels. 4 if the type is chosen at run time: most wide
    loads then lie on float32's path.
    """
    if not function_of(name).startswith("scan"):
        return None
    return 2 if re.search(r"\bb?float16\b", name) else 4


def commit_of_kernels() -> str:
    """The last commit that changed the kernels' sources; "-dirty" is added if the tree differs from it."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    commit = git("log", "-1", "--format=%h", "--abbrev=12", "--", "csrc", "setup.py")
    return f"{commit}-dirty" if git("status", "--porcelain", "--", "csrc", "setup.py") else commit

"""benchmarks/results/kernel-code/README.md: the tables of one result, and how it differs from the first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.results import read_all
from benchmarks.kernel_code.bounds import BANDWIDTH, CLOCK, MULTIPROCESSORS, SCAN, VOCABULARY, least_times
from benchmarks.kernel_code.instructions import CLASSES, OPCODES
from benchmarks.kernel_code.measure import DETAILED, function_of

RESULTS = Path("benchmarks/results/kernel-code")
PAGE = Path("benchmarks/results/kernel-code/README.md")
HEADER = """# The kernels' machine code

Written by `python -m benchmarks.kernel_code` from the compiled library and from `benchmarks/results/kernel-code/`; do not edit.
No GPU is needed, and nothing here is a measured time: these are counts, to reason with before a GPU measures.
`tests/measurement/kernel_limits.py` says which of them may not grow, and `make test` holds that.
"""
TERMS = """## What the numbers mean

- **registers** of a thread. A multiprocessor has 65,536: a block of 512 threads fits once at 128 registers, twice at 64.
- **stack**: bytes of local memory that each thread addresses. It is device memory behind the caches. Arrays that are indexed
  at run time lie there, and registers that did not fit (*spills*). A fast kernel has 0.
- **local loads, stores** (LDL, STL): the instructions that go there. The library does not say which of them are spills.
- **shared**: bytes of static shared memory of a block. From sm_90 on, 1,024 of them are the system's. A launch may add more.
- **code**: bytes, 16 for each instruction. The first run of an instruction waits for memory, and every run that no cache holds.
- **wide loads** (LDG.128): instructions that load 16 bytes a lane from global memory.
- **in flight**: wide loads that are issued before the result of any is used, found by following registers through all
  branches: of the shortest such run, and of the longest. Each run costs one latency of memory.
- **hot part**: the smallest loop with the most matrix products, or else with the most wide loads; the kernel's own code,
  without the functions that it calls, where no loop has as many. *all* counts its instructions, *path* those of one turn on
  an ordinary way: the way with the most wide loads, then with the most arithmetic (matrix products alone, where there are
  any), then with the fewest other instructions. Inner loops count once, and a call counts as one instruction.
- **bytes** that the wide loads of a turn, and the copies to shared memory, bring to a warp of 32 lanes.
- **instructions per logit**: *path* over the logits in those bytes. A multiprocessor of sm_90 issues four instructions
  a clock, and an H200's memory brings it some 16 bytes a clock: at 2 bytes a logit more than half an instruction per logit
  means that arithmetic, not memory, sets the time. Where the type of the logits is chosen at run time, it is the way of
  float32. A kernel with less than half of its arithmetic in its hot part has no such number.
- `AttentionShape<type, D, M>` is for heads of D and 16 M rows of queries at once; *16-bit* is bfloat16 and float16.
"""


def read_results(root: Path) -> list[dict[str, Any]]:
    """Every result, oldest first."""
    return read_all(root / RESULTS)


def save(result: dict[str, Any], root: Path) -> Path:
    """Writes one result, a kernel per line so that a diff can be read."""
    path = root / RESULTS / f"{result['commit']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in result.items() if key != "kernels"]
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in result["kernels"].items()]
    path.write_text("\n".join(["{", *head, ' "kernels": {', ",\n".join(rows), " }", "}", ""]))
    return path


def render(results: list[dict[str, Any]]) -> str:
    """The page: the newest result, beside the first."""
    if not results:
        return f"{HEADER}\nNothing is measured yet.\n"
    first, newest = results[0], results[-1]
    parts = [HEADER, f"Kernels of commit {newest['commit']}, compiled by {newest['compiler']}.\n", TERMS]
    parts += ["## What each kernel takes\n", *_resource_table(newest)]
    parts += [f"\n## What the code consists of, {DETAILED}\n", *_instruction_table(newest)]
    parts += [f"\n## Hot parts, {DETAILED}\n", *_hot_table(newest)]
    parts += ["\n## The least time of a scan\n", *_bounds_table(newest)]
    parts += ["\n## Before and after\n", *_difference(first, newest)]
    return "\n".join(parts) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def _count(value: int | None) -> str:
    return f"{value:,}" if value else ""


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    alignment = ["---", *["--:"] * (len(columns) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (columns, alignment, *rows)]


def _label(name: str, row: dict[str, Any]) -> str:
    return f"`{name}`" + (f", {row['kinds']} kinds" if row["kinds"] > 1 else "")


def _resource_table(result: dict[str, Any]) -> list[str]:
    architectures = list(dict.fromkeys(a for row in result["kernels"].values() for a in row["resources"]))
    places = ", ".join(architectures)
    intro = f"Numbers for {places}, in this order; of several kinds of a kernel the largest of each.\n"
    sorts = {"registers": "registers", "stack": "stack", "shared": "shared", "code": "code"}
    rows = [
        [
            _label(name, row),
            *(
                " · ".join(_number(row["resources"].get(architecture, {}).get(sort)) for architecture in architectures)
                for sort in sorts
            ),
        ]
        for name, row in result["kernels"].items()
    ]
    total = " · ".join(map(_number, result["code"].values()))
    return [intro, *_table(["kernel", *sorts.values()], rows), f"\nCode of all kernels and kinds together: {total}."]


def _instruction_table(result: dict[str, Any]) -> list[str]:
    rows = {name: row for name, row in result["kernels"].items() if "classes" in row}
    classes = [one for one in (*CLASSES, "other") if any(one in row["classes"] for row in rows.values())]
    opcodes = [one for one in OPCODES if any(one in row["opcodes"] for row in rows.values())]
    by_class = _table(
        ["kernel", "all", *classes],
        [
            [_label(name, row), _number(row["instructions"]), *(_count(row["classes"].get(one)) for one in classes)]
            for name, row in rows.items()
        ],
    )
    single = _table(
        ["kernel", *opcodes, "in flight"],
        [
            [
                _label(name, row),
                *(_count(row["opcodes"].get(one)) for one in opcodes),
                "–".join(map(str, dict.fromkeys(row["loads_in_flight"].values()))),
            ]
            for name, row in rows.items()
        ],
    )
    return ["Of several kinds the largest one's.\n", *by_class, "\nSome of these instructions alone:\n", *single]


def _hot_table(result: dict[str, Any]) -> list[str]:
    rows = {name: row["hot"] for name, row in result["kernels"].items() if "hot" in row}
    classes = [one for one in CLASSES if any(one in hot["classes"] for hot in rows.values())]
    shown = [
        [
            f"`{name}`",
            hot["part"],
            _number(hot["all"]),
            _number(hot["path"]),
            _number(hot["bytes"]),
            _number(hot.get("bytes_per_logit")),
            _number(hot["path"] / hot["logits"] if "logits" in hot else None),
            *(_count(hot["classes"].get(one)) for one in classes),
        ]
        for name, hot in rows.items()
    ]
    numbers = ["part", "all", "path", "bytes", "bytes per logit", "instructions per logit"]
    return _table(["kernel", *numbers, *(f"path: {one}" for one in classes)], shown)


_COMPARED: dict[str, tuple[Callable[..., float], Callable[[dict[str, Any]], float | None]]] = {
    "registers": (max, lambda row: row["resources"].get(DETAILED, {}).get("registers")),
    "stack": (max, lambda row: row["resources"].get(DETAILED, {}).get("stack")),
    "code": (max, lambda row: row["resources"].get(DETAILED, {}).get("code")),
    "local loads": (max, lambda row: row.get("classes", {}).get("local load", 0)),
    "local stores": (max, lambda row: row.get("classes", {}).get("local store", 0)),
    "wide loads in flight": (min, lambda row: row.get("loads_in_flight", {}).get("fewest") or None),
    "barriers": (max, lambda row: row.get("classes", {}).get("barrier", 0)),
    "atomics that are CAS loops": (max, lambda row: row.get("opcodes", {}).get("ATOMS, CAS loop", 0)),
    "instructions of the hot part, path": (max, lambda row: row.get("hot", {}).get("path")),
    "instructions per logit": (
        max,
        lambda row: row["hot"]["path"] / row["hot"]["logits"] if "logits" in row.get("hot", {}) else None,
    ),
}
"""What before and after are compared by: which kind of a kernel counts, and the number."""


def _bounds_table(result: dict[str, Any]) -> list[str]:
    times = least_times(result)
    if not times:
        return ["The scan was not read."]
    scan = result["kernels"][SCAN]["scan"]
    said = (
        f"A bound from below, not a measurement: an H200 ({MULTIPROCESSORS} multiprocessors, {CLOCK / 1e9} GHz, "
        f"{BANDWIDTH / 1e12} TB/s) scanning the rows of an accept step under `rejection`, {VOCABULARY:,} bfloat16 logits each. "
        f"A warp's way to its first load takes {scan['way_in']} instructions, a chunk of 1,024 logits from there to its sum "
        f"{scan['work']}. Launches, waiting and the walk come on top; at one request they are most of the time.\n"
    )
    rows = [[name, f"{count:,}", f"{of_bytes:.1f}", f"{of_code:.1f}"] for name, count, of_bytes, of_code in times]
    return [said, *_table(["step", "rows", "µs of bytes", "µs of instructions"], rows)]


def _worst(result: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Kernel function -> each compared number, of its worst kind."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in result["kernels"].items():
        groups.setdefault(function_of(name), []).append(row)
    return {
        function: {
            what: worst((number for row in rows if (number := read(row)) is not None), default=None)
            for what, (worst, read) in _COMPARED.items()
        }
        for function, rows in groups.items()
    }


def _difference(first: dict[str, Any], newest: dict[str, Any]) -> list[str]:
    if first["commit"] == newest["commit"]:
        return [f"This is the first result, before any change: commit {first['commit']}."]
    before, after = _worst(first), _worst(newest)
    rows = [
        [f"`{function}`", what, _number(before[function][what]), _number(number)]
        for function, numbers in after.items()
        if function in before
        for what, number in numbers.items()
        if number != before[function][what]
    ]
    said = [
        f"Before: commit {first['commit']}, {first['compiler']}. After: commit {newest['commit']}, {newest['compiler']}."
        f" {DETAILED}; of each kernel function its worst kind. Numbers that are the same are left out.\n",
        *_table(["kernel", "number", "before", "after"], rows),
    ]
    for word, functions in (("Gone", before.keys() - after.keys()), ("New", after.keys() - before.keys())):
        if functions:
            said.append(f"\n{word}: {', '.join(f'`{function}`' for function in sorted(functions))}.")
    return said

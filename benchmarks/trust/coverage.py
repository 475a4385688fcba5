"""Branches of csrc/core that the op tests take on the CPU, counted by gcov.

A copy of the tree is built without optimisation, with --coverage and for one instruction set, and the tests that must notice a
fault in csrc/core (tests/mutation/table.py) run there, with what they compile themselves built in the same way: an optimiser
merges and removes branches. A template counts once: a branch is taken if any instance takes it. Instances that differ in
the number of branches of a line, since the compiler knows some of its conditions, count each number as branches of their own.
Edges of exceptions are left out.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from mutation.table import TARGETS

from benchmarks import ROOT

TREE = ROOT / "build" / "coverage"
PARTS = (
    "benchmarks",
    "csrc",
    "pass_ext",
    "tests",
    "examples",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "docs",
    "LICENSE",
)
ONE_ISA = ("each_isa.h", "isa.h", "isa.cpp", "core.cpp")  # where x86's instruction sets are switched off
NEVER = ("platform.h",)
"""Files without branches of the product: macros and ends of impossible cases."""
_REFUSED = "the CPU refuses such values before; kernels of the GPU check them here"
_ONE_THREAD = "one thread walks on the CPU; on a GPU others stand by"
REASONS = {
    "accept_walk.h: else if (goes<known>(Route::down))": "the last of the routes",
    "accept_walk.h: return i == 0 ? parent != -1": _REFUSED,
    "accept_walk.h: if (described != nullptr && rows_.is_leader())": _ONE_THREAD,
    "accept_walk.h: if (!rows_.is_leader()) return;": _ONE_THREAD,
    "accept_walk.h: share = overlap[0] > 0.0 ?": "where p and q share nothing, the first rho that is tried is right",
    "accept_walk.h: if (p > bound && p > 0.0f)": "no bound is negative",
    "attention.h: if (start > -64 && start < request.nodes)": "no key after a request's last node is asked about",
    "distribution.h: return parameters.top_k > 0": "kernels of the GPU ask, and an enumeration without filters",
    "next.h: const int64_t length = known < 0": _REFUSED,
    "next.h: if (root.at_limit || accepted < 0": _REFUSED,
    "next.h: if (problem.groups != nullptr && limit": _REFUSED,
    "next.h: if (root.offered >= problem.slots)": _REFUSED,
    "next.h: return row > 0 && parent < 0": _REFUSED,
    "next.h: if (place < problem.text_room)": _REFUSED,
    "next_tree.h: judged.parents[row] = row > 0": _REFUSED,
    "next_tree.h: if (last < 0 || last >= row_count)": _REFUSED,
    "recall.h: const int64_t end = length < 0": _REFUSED,
    "shard.h: return round == Round::masses": "no row is asked in other rounds",
    "shard_combine.h: } else if (round == Round::residuals": "a state that these ops wrote asks for nodes that there are",
    "shard_combine.h: if (asking.asks < 0)": "a walk without an answer asks nothing more at that node",
    "shard.h: while (bits < 64": "keys have 54 bits",
    "shard_combine.h: return child < 0 ? -kInfinity": "a walk asks for logits of its nodes' tokens alone",
    "shard_combine.h: for (int i = 0; i < kOverlaps; ++i)": "rules that need overlaps gather the logits",
    "shard_combine.h: if (!found.is_enough": "a nucleus that rounding leaves just short of its mass keeps all tokens",
    "shard_combine.h: if (problem.target_sampling.temperature == nullptr": "greedy steps have no races",
    "shard_combine.h: for (int32_t i = 0; i < request.nodes && i <": "no tree of more than 1024 nodes is tried on shards",
    "adapter.h: if (id >= 0) return -1;": "the CPU asks for look-ahead rows alone",
    "attention_lists.h: if (key < 0 || key >= request.keys()": _REFUSED,
    "attention.h: if (problem.block_table && (outer < 0": _REFUSED,
    "attention.h: MergeWeights weights = weights_of(": "one part beside a sink: the GPU's attention alone",
    "cache.h: request.rows = static_cast<int32_t>(": _REFUSED,
    "cache.h: return node < request.nodes ? node : -1;": _REFUSED,
    "cache.h: if (node < 0 || (step.in_place": _REFUSED,
    "cache.h: if (to < 0) return {-1, -1};": _REFUSED,
    "convolution.h: node = parent < node ? parent : -1;": _REFUSED,
    "distribution.h: if (guess - around > below": "the ends of the floats are never so near to the guess",
    "distribution.h: if (guess + around < reaches": "the ends of the floats are never so near to the guess",
    "layer.h: explicit operator bool()": "no norm has a weight without numbers",
    "next.h: context.last[n] = place >= text.begin": _REFUSED,
    "next.h: if (next.id < 0) break;": "for sums that rounding leaves short of top-p",
    "next_tree.h: judged.parents[row + length] == row + length - 1)": "rows that next_tree_ wrote have their slots in a chain",
    "next_tree.h: judged.slots[row] = id < 0": "no row that next_tree_ wrote has a slot above the most that it takes",
    "next_tree.h: while (after < on_chain": "the best chain begins with the first candidate, where the search ends",
    "next_tree.h: return reach_a > reach_b": "the CPU looks at earlier parents first; a GPU does not",
    "recurrent.h: return slot >= 0 && slot < slots": _REFUSED,
    "state.h: if (accepted.first < 0 || last <= accepted.first": _REFUSED,
    "state.h: accepted.length = static_cast<int32_t>(": _REFUSED,
    "state.h: return node >= 0 && node < accepted.nodes": _REFUSED,
    "tree.h: return parent >= 0 && parent < node": _REFUSED,
    "tree.h: const int64_t first = begin < 0": _REFUSED,
    "tree.h: const int64_t last = end < first": _REFUSED,
    "tree.h: const int64_t prefix = length < 0": _REFUSED,
    "cache.h: const bool fits = request.first >= 0": _REFUSED,
    "cache.h: if (request.nodes <= 0 || !fits": _REFUSED,
}
"""Header and the beginning of a line -> why no test takes some of its branches."""
COMPILER = """#!/bin/sh
exec g++ "$@" --coverage -fprofile-update=atomic '-fprofile-filter-files=.*/csrc/core/.*' -O0
"""
"""-O0 comes last, since the tests ask for -O1. Counting in csrc/cpu too would take ten times as long."""
LEFT_OUT = (
    "not compile and not emulat and not largest and (more_than_1024 or not 1024) and not many_groups and not thread_count "
    "and not odd_voc and not counts_in_64_bits"
)
"""Tests that take minutes without optimisation, or build the emulator, and reach no other branches."""


def measure() -> dict[str, Any]:
    """For each header its branches, those taken, and the lines of the others; and the tests that ran."""
    check_versions()
    _copy()
    for data in TREE.glob("build/**/*.gcda"):
        data.unlink()
    compiler = TREE / "build" / "g++"
    compiler.parent.mkdir(exist_ok=True)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "DEBUG": "1", "PASS_EXT_CUDA": "0", "PYTHONPATH": str(TREE)}
    environment.setdefault("MAX_JOBS", "2")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=TREE, env=environment, check=True)
    passed, failed = 0, 0
    for files in tests():
        pytest = [sys.executable, "-m", "pytest", *files, "--device", "cpu", "-m", "not slow", "-k", LEFT_OUT, "-q"]
        options = ["-n", "0", "-p", "no:cacheprovider", "-o", "timeout=3000"]
        done = subprocess.run([*pytest, *options], cwd=TREE, env=environment, capture_output=True, text=True)
        wrong = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
        print(*wrong, done.stdout.splitlines()[-1], " ".join(files), sep="\n", flush=True)
        passed += sum(map(int, re.findall(r"(\d+) passed", done.stdout[-200:])))
        failed += len(wrong)
    return {"passed": passed, "failed": failed, "files": files_of(taken(), TREE / "csrc/core")}


def tests() -> list[list[str]]:
    """The quick tests that must notice a fault in csrc/core, folder by folder."""
    tests = {test for name, (_, tests) in TARGETS.items() if name.startswith("csrc/core/") for test in tests}
    folders: dict[str, list[str]] = {}
    for test in sorted(test for test in tests if test.startswith("tests/")):
        folders.setdefault(test.rpartition("/")[0] if test.endswith(".py") else test, []).append(test)
    return list(folders.values())


def check_versions() -> None:
    """Raises where gcov is not that of g++: it could not read the counts."""
    first = {
        name: subprocess.run([name, "--version"], capture_output=True, text=True).stdout for name in ("g++", "gcov")
    }
    found = {name: text.partition("\n")[0].rpartition(" ")[2] for name, text in first.items()}
    if found["g++"] != found["gcov"]:
        raise RuntimeError(f"gcov must be of g++'s version, got g++ {found['g++']} and gcov {found['gcov']}")


def _copy() -> None:
    for part in PARTS:
        for file in (ROOT / part).rglob("*") if (ROOT / part).is_dir() else [ROOT / part]:
            if not file.is_file() or file.suffix in (".so", ".pyc") or {"__pycache__", "results"} & set(file.parts):
                continue
            text, path = file.read_bytes(), TREE / file.relative_to(ROOT)
            if file.name in ONE_ISA:
                text = text.replace(b"defined(__x86_64__)", b"0")
            if not path.exists() or path.read_bytes() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)


Place = tuple[str, tuple[int, int], int, int, int]
"""Header, start of the function, line, number of branches of the line, which of them."""
Branches = dict[Place, int]
"""How often each was taken."""


def taken(tree: Path = TREE) -> Branches:
    """The branches of every object file with counts, but for the emulator's: it runs what the GPU runs."""
    counts: Branches = {}
    work = tree / "build" / "gcov"
    for data in sorted(data for data in tree.glob("build/**/*.gcda") if "_emulator" not in data.parts):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        subprocess.run(["gcov", "-b", "-c", "--json-format", data], cwd=work, capture_output=True, check=True)
        for file in work.glob("*.gz"):
            add(counts, json.loads(gzip.decompress(file.read_bytes())))
    return counts


def add(counts: Branches, report: dict[str, Any]) -> None:
    """Adds the branches of headers in csrc/core of one report of gcov."""
    for file in report["files"]:
        folder, name = Path(file["file"]).parts[-2:] if "/" in file["file"] else ("", file["file"])
        if folder != "core" or "csrc" not in file["file"] or name in NEVER:
            continue
        starts = {function["name"]: _start(function) for function in file["functions"]}
        for line in file["lines"]:
            number = line["line_number"]
            # gcov names the function where several begin at one line, such as instances of a template.
            around = [_start(f) for f in file["functions"] if f["start_line"] <= number <= f["end_line"]]
            start = starts.get(line.get("function_name"), max(around, default=(0, 0)))
            real = without_exceptions(line["branches"])
            for which, branch in enumerate(real):
                place = name, start, number, len(real), which
                counts[place] = counts.get(place, 0) + branch["count"]


def _start(function: dict[str, Any]) -> tuple[int, int]:
    return function["start_line"], function["start_column"]


def without_exceptions(branches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The branches but for calls that may throw: gcov lists such a call's way on, then its exception."""
    calls = {which for which, branch in enumerate(branches) if branch["throw"]}
    return [branch for which, branch in enumerate(branches) if not {which, which + 1} & calls]


def why(name: str, text: str) -> str:
    """Why no test takes some branches of a line."""
    return next((reason for key, reason in REASONS.items() if f"{name}: {text}".startswith(key)), "not examined")


def files_of(counts: Branches, sources: Path = ROOT / "csrc/core") -> list[dict[str, Any]]:
    """Header -> branches, branches taken, and each line with some that are not: its text, how many, and why."""
    rows = []
    for name in sorted({place[0] for place in counts}):
        of_file = {place: count for place, count in counts.items() if place[0] == name}
        lines = (sources / name).read_text().splitlines()
        missed = Counter(place[2] for place, count in of_file.items() if not count)
        rows.append(
            {
                "file": name,
                "branches": len(of_file),
                "taken": sum(count > 0 for count in of_file.values()),
                "missed": [
                    {
                        "line": line,
                        "branches": missed[line],
                        "text": text,
                        "why": why(name, text),
                    }
                    for line in sorted(missed)
                    for text in [lines[line - 1].partition("  // ")[0].strip()]
                ],
            }
        )
    return rows

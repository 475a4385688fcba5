"""Branches of csrc/core that the op tests take on the CPU, counted by gcov.

A copy of the tree is built without optimisation, with --coverage and for one instruction set, and the tests that must notice a
fault in csrc/core (tests/mutation/table.py) run there. A template counts once: a branch is taken if any of its instances takes
it. Edges of exceptions are left out.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
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


def measure() -> dict[str, Any]:
    """For each header its branches, those taken, and the lines of the others; and the tests that ran."""
    _copy()
    environment = {**os.environ, "CXX": "g++ --coverage -fprofile-update=atomic", "DEBUG": "1", "PASS_EXT_CUDA": "0"}
    environment["PYTHONPATH"] = str(TREE)
    environment.setdefault("MAX_JOBS", "2")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=TREE, env=environment, check=True)
    chosen = {tuple(tests) for name, (_, tests) in TARGETS.items() if name.startswith("csrc/core/")}
    passed, failed = 0, 0
    for tests in sorted(chosen):
        pytest = [sys.executable, "-m", "pytest", *tests, "--device", "cpu", "-m", "not slow", "-q"]
        options = ["-n", "0", "-p", "no:cacheprovider", "-o", "timeout=3000"]
        done = subprocess.run([*pytest, *options], cwd=TREE, env=environment, capture_output=True, text=True)
        print(done.stdout.strip().splitlines()[-1], " ".join(tests), flush=True)
        passed += sum(map(int, re.findall(r"(\d+) passed", done.stdout)))
        failed += sum(map(int, re.findall(r"(\d+) (?:failed|error)", done.stdout)))
    return {"passed": passed, "failed": failed, "files": files_of(taken(), TREE / "csrc/core")}


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


Branches = dict[tuple[str, int, int], int]
"""(header, line, number of the branch in the line) -> how often it was taken."""


def taken() -> Branches:
    """The branches of every object file with counts."""
    counts: Branches = {}
    work = TREE / "build" / "gcov"
    for data in sorted(TREE.glob("build/**/*.gcda")):
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
        for line in file["lines"]:
            real = [branch for branch in line["branches"] if not branch["throw"]]
            for number, branch in enumerate(real):
                place = name, line["line_number"], number
                counts[place] = counts.get(place, 0) + branch["count"]


def files_of(counts: Branches, sources: Path = ROOT / "csrc/core") -> list[dict[str, Any]]:
    """Header -> branches, branches taken, and the text of each line with one that is not."""
    rows = []
    for name in sorted({name for name, _, _ in counts}):
        of_file = {(line, number): count for (file, line, number), count in counts.items() if file == name}
        lines = (sources / name).read_text().splitlines()
        missed = sorted({line for (line, _), count in of_file.items() if not count})
        rows.append(
            {
                "file": name,
                "branches": len(of_file),
                "taken": sum(count > 0 for count in of_file.values()),
                "missed": [{"line": line, "text": lines[line - 1].strip()} for line in missed],
            }
        )
    return rows

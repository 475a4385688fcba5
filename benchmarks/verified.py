"""Writes verified.json, the record of one run of benchmarks/gpu.sh: what ran, on what, and which kernels it verified.

A kernel is verified by the tests of its own column and of every kernel file that includes it, if at least one ran on
the GPU and none failed. Called by benchmarks/gpu.sh after every stage, so that a run cut short leaves what it had;
read by benchmarks/gpu_status.py.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import machine
from benchmarks.gpu_status import ROOT, content_hash, is_verified, kernel_files, with_headers

Counts = dict[str, dict[str, int]]
SANITIZERS = ("memcheck", "racecheck")


def count_tests(report: Path) -> Counts:
    """Per test module, how many tests passed and failed on the GPU; skipped ones count for nothing."""
    counts: Counts = {}
    if not report.exists():
        return counts
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = (case.get("classname") or "").split(".test_")[-1].removeprefix("test_").split(".")[0]
        outcome = counts.setdefault(module, {"passed": 0, "failed": 0})
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            outcome["failed"] += 1
        elif "skipped" not in outcomes and runs_on_gpu(case.get("name") or ""):
            outcome["passed"] += 1
    return counts


def runs_on_gpu(test: str) -> bool:
    """Whether a test's parameters name the CUDA backend: test_x[cuda], test_x[3-cuda-bfloat16]."""
    parameters = re.search(r"\[(.*)\]$", test)
    return bool(parameters) and "cuda" in parameters[1].split("-")


def judge_kernels(counts: Counts, root: Path, sanitized: dict[str, Counts] | None = None) -> dict[str, dict[str, Any]]:
    """For each kernel file its hash, and the tests that ran it: those of modules test_<column> and test_<column>_*.

    `sanitized`: the same counts for each sanitizer that found nothing.
    """
    files = kernel_files(root)
    kernels = {}
    for file in files:
        columns = {user.stem for user in files if file in with_headers(user, root)}
        modules = [m for m in sorted(counts) if any(m == c or m.startswith(f"{c}_") for c in columns)]
        kernels[file.name] = {
            "hash": content_hash(file, root),
            "tests_passed": sum(counts[module]["passed"] for module in modules),
            "tests_failed": sum(counts[module]["failed"] for module in modules),
            "test_modules": modules,
            "sanitized": {
                tool: passed
                for tool, found in (sanitized or {}).items()
                if (passed := sum(found[module]["passed"] for module in modules if module in found))
            },
        }
    return kernels


def read_stages(path: Path) -> dict[str, str]:
    """Stage name to outcome, from the lines that gpu.sh writes: name, tab, outcome."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split("\t", 1) for line in lines)


def show(record: dict[str, Any]) -> None:
    """The summary that ends a run; plain, for any log."""
    for stage, outcome in record["stages"].items():
        print(f"{stage:<24} {outcome}")
    for name, entry in record["kernels"].items():
        state = "verified" if is_verified(entry) else "NOT verified"
        tests = f"{entry['tests_passed']} passed, {entry['tests_failed']} failed"
        print(f"{name:<24} {state:<13} {entry['hash']}  {tests}")


def main() -> int:
    """Entry point of `python -m benchmarks.verified`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tests",
        type=Path,
        required=True,
        help="pytest's junit file of the run with --device cuda; beside it those of the sanitizers",
    )
    parser.add_argument("--stages", type=Path, required=True, help="a line per stage: name, tab, outcome")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    stages, folder = read_stages(options.stages), options.tests.parent
    clean = {tool: count_tests(folder / f"{tool}.xml") for tool in SANITIZERS if stages.get(tool) == "passed"}
    record = {
        "format": 1,
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe_machine(),
        "versions": machine.describe_versions(),
        "stages": stages,
        "kernels": judge_kernels(count_tests(options.tests), options.root, clean),
    }
    if record["machine"]["gpu"] is None:
        print("verified: torch sees no GPU, so there is nothing to record", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    show(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

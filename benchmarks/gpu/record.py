"""Merges the GPU runs of a commit into one record of verified kernels.

    a kernel is verified  =  at least one test of its op families passed on the GPU, and none failed or did not end

The last outcome of a test counts; failures in earlier runs of the commit are counted apart. The tests of a kernel file are
those of its op family and of every kernel file that includes it. ``python -m benchmarks.gpu.record FOLDER`` reads the evidence
in a folder and writes verified-<commit>.json and the results of the benchmarks into it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import evidence
from benchmarks.pages.gpu_status import content_hash, is_verified, kernel_files, with_headers

TESTS = "tests"
SANITIZERS = {"memcheck": ("memcheck",), "racecheck": ("racecheck", "racecheck-rest")}
"""Tool -> the stages that run it."""


def describe_kernels(root: Path) -> dict[str, dict[str, Any]]:
    """Kernel file -> its content hash and the op families whose tests run it: the names of the files that include it."""
    files = kernel_files(root)
    users = {user.name: with_headers(user, root) for user in (*files, *sorted((root / "csrc" / "cuda").glob("*.cu")))}
    return {
        file.name: {
            "hash": content_hash(file, root),
            "families": sorted({Path(user).stem for user, headers in users.items() if file in headers}),
        }
        for file in files
    }


def module_of(test: str) -> str:
    """tests/ops/accept/test_accept_exactness.py::test_x[cuda] -> accept_exactness."""
    return Path(test.partition("::")[0]).stem.removeprefix("test_")


def runs_on_gpu(test: str) -> bool:
    """True if the parameters of a test name the CUDA backend: test_x[cuda], test_x[3-cuda-bfloat16]."""
    parameters = re.search(r"\[(.*)\]$", test)
    return bool(parameters) and "cuda" in parameters[1].split("-")


def count(outcomes: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Test module -> numbers of passed and failed tests. A test that began and did not end has failed; others do not count."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for test, outcome in outcomes.items():
        if outcome in ("failed", "begun"):
            counts[module_of(test)]["failed"] += 1
        elif outcome == "passed" and runs_on_gpu(test):
            counts[module_of(test)]["passed"] += 1
    return counts


def make_record(runs: Iterable[list[evidence.Fact]]) -> dict[str, Any]:
    """The record of one commit from the facts of its runs, oldest first."""
    outcomes: dict[str, dict[str, str]] = defaultdict(dict)
    stages: dict[str, str] = {}
    jobs: dict[tuple[str, str], str] = {}
    failed_before: set[str] = set()
    first: evidence.Fact = {}
    for facts in runs:
        first = next(fact for fact in facts if fact["kind"] == "run")
        for fact in facts:
            if fact["kind"] == "stage":
                stages[fact["name"]] = fact["state"]
            elif fact["kind"] == "job":
                jobs[fact["stage"], fact["name"]] = fact["state"]
        for stage in (TESTS, *chain(*SANITIZERS.values())):
            for test, outcome in evidence.outcomes(facts, stage).items():
                if stage == TESTS and outcomes[stage].get(test) in ("failed", "begun"):
                    failed_before.add(test)
                outcomes[stage][test] = outcome
    sanitized = {
        tool: count(
            {
                test: outcome
                for stage in stages_of_tool
                for test, outcome in outcomes[stage].items()
                if jobs.get((stage, family_of(test))) == "passed"
            }
        )
        for tool, stages_of_tool in SANITIZERS.items()
    }
    # A run may have missed families of a file: those of a file that is still the same are added.
    known = {(name, kernel["hash"]): kernel["families"] for name, kernel in describe_kernels(ROOT).items()}
    return {
        "format": 2,
        **{key: first[key] for key in ("date", "commit", "machine", "versions")},
        "stages": stages,
        "kernels": {
            name: _judge(
                {**kernel, "families": sorted({*kernel["families"], *known.get((name, kernel["hash"]), ())})},
                count(outcomes[TESTS]),
                sanitized,
                failed_before,
            )
            for name, kernel in first["kernels"].items()
        },
    }


def family_of(test: str) -> str:
    """The op family of a test: the first word of its module."""
    return module_of(test).partition("_")[0]


def _judge(
    kernel: Mapping[str, Any],
    counts: Mapping[str, Counter[str]],
    sanitized: Mapping[str, Mapping[str, Counter[str]]],
    failed_before: set[str],
) -> dict[str, Any]:
    def is_of_kernel(module: str) -> bool:
        return any(module == family or module.startswith(f"{family}_") for family in kernel["families"])

    modules = sorted(filter(is_of_kernel, counts))
    clean = {
        tool: sum(c["passed"] for module, c in modules_of_tool.items() if is_of_kernel(module))
        for tool, modules_of_tool in sanitized.items()
    }
    return {
        "hash": kernel["hash"],
        "tests_passed": sum(counts[module]["passed"] for module in modules),
        "tests_failed": sum(counts[module]["failed"] for module in modules),
        "failed_before": sum(is_of_kernel(module_of(test)) for test in failed_before),
        "test_modules": modules,
        "sanitized": {tool: passed for tool, passed in clean.items() if passed},
    }


def records(folder: Path) -> list[dict[str, Any]]:
    """A record for each commit that has evidence in the folder, oldest first."""
    runs: dict[str, list[list[evidence.Fact]]] = defaultdict(list)
    files = [path for path in folder.glob("evidence-*.jsonl") if evidence.run_of(path)]
    for path in sorted(files, key=lambda path: evidence.run_of(path)["at"]):
        runs[evidence.run_of(path)["commit"]].append(list(evidence.read(path)))
    return [make_record(of_commit) for of_commit in runs.values()]


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Result file -> the latest result in the folder's evidence; quick runs are left out, cut-off runs are not."""
    latest = {}
    for path in sorted(folder.glob("evidence-*.jsonl"), key=lambda path: evidence.run_of(path).get("at", 0)):
        for fact in evidence.read(path):
            if fact["kind"] == "bench" and not fact["result"]["quick"]:
                latest[fact["file"]] = fact["result"]
    return latest


def write(folder: Path) -> list[dict[str, Any]]:
    """Writes records and benchmark results into the folder; returns the records."""
    written = records(folder)
    for record in written:
        (folder / f"verified-{record['commit']}.json").write_text(json.dumps(record, indent=1) + "\n")
    for file, result in results(folder).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(json.dumps(result, indent=1) + "\n")
    return written


def show(record: Mapping[str, Any]) -> None:
    """Prints the summary of a record as plain text."""
    for stage, state in record["stages"].items():
        print(f"{stage:<24} {state}")
    for name, entry in record["kernels"].items():
        state = "verified" if is_verified(entry) else "NOT verified"
        tests = f"{entry['tests_passed']} passed, {entry['tests_failed']} failed"
        print(f"{name:<24} {state:<13} {entry['hash']}  {tests}")


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.record`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="benchmarks/results/<GPU>, with the evidence-*.jsonl of its runs")
    folder = parser.parse_args().folder
    written = write(folder)
    if not written:
        print(f"record: {folder} must hold evidence-*.jsonl, it holds none", file=sys.stderr)
        return 1
    show(written[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())

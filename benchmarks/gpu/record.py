"""Merges the GPU runs of a commit into one record of verified kernels.

    a kernel is verified  =  at least one test of its op families passed on the GPU, and none failed or did not end

The last outcome of a test counts; failures in earlier runs of the commit are counted apart. The tests of a kernel file are
those of its op family and of every kernel file that includes it. ``python -m benchmarks.gpu.record FOLDER`` takes the evidence
that a run left in a folder to benchmarks/results/<GPU>/, writes verified-<commit>.json and the results of the benchmarks there
and the pages that show them, and with ``--commit`` commits these.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import evidence
from benchmarks.harness.machine import slug
from benchmarks.pages.gpu_status import content_hash, is_verified, kernel_files, with_headers

TESTS, SANITIZERS = "tests", ("memcheck", "racecheck")
"""The stages whose outcomes count."""
REST = "-rest"
"""Ends the name of the stage that does what another leaves; outcomes bear the other's name."""
TIMES, PAGE_OF_TIMES = "kernel-time.json", "benchmarks.kernel_time"
PAGES = ("benchmarks.pages.gpu_status", "benchmarks.pages", "tools.performance")
"""The programs that write the pages of results. That of kernel times also keeps which kernels the GPU has timed."""


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
        for stage in (TESTS, *SANITIZERS):
            for test, outcome in evidence.outcomes(facts, stage).items():
                if stage == TESTS and outcomes[stage].get(test) in ("failed", "begun"):
                    failed_before.add(test)
                outcomes[stage][test] = outcome
    sanitized = {
        tool: count(
            {test: ended for test, ended in outcomes[tool].items() if jobs.get((tool, module_of(test))) == "passed"}
        )
        for tool in SANITIZERS
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
    """Result file -> the latest result in the folder's evidence, or of its commit the longest. Quick runs are left out, cut-off
    runs are not: the next run of the commit may be cut off sooner."""
    latest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("evidence-*.jsonl"), key=lambda path: evidence.run_of(path).get("at", 0)):
        for file, result in evidence.results(evidence.read(path)).items():
            before = latest.get(file, {})
            is_shorter = result.get("commit") == before.get("commit") and _items(result) < _items(before)
            if not (result.get("quick", True) or is_shorter):
                latest[file] = result
    return latest


def _items(result: Mapping[str, Any]) -> int:
    return sum(len(value) for value in result.values() if isinstance(value, list))


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


def take_over(folder: Path, root: Path) -> Path:
    """Copies the evidence in a folder to benchmarks/results/<GPU>/, which is returned. SystemExit if it holds none."""
    logs = {
        path: path.with_suffix(".log") for path in sorted(folder.rglob("evidence-*.jsonl")) if evidence.run_of(path)
    }
    if not logs:
        raise SystemExit(f"record: {folder} must hold evidence-*.jsonl, it holds none")
    (name,) = {evidence.run_of(path)["machine"]["gpu"]["name"] for path in logs}
    kept = root / "benchmarks" / "results" / slug(name)
    kept.mkdir(parents=True, exist_ok=True)
    for path in (*logs, *filter(Path.exists, logs.values())):
        if path.parent.resolve() != kept.resolve():
            shutil.copyfile(path, kept / path.name)
    return kept


def write_pages(folder: Path, root: Path) -> bool:
    """Writes the pages that show the results of a folder; False if one cannot be written, as its program says."""
    times = f"{PAGE_OF_TIMES} {'--as-measured' if TIMES in results(folder) else '--render'}"
    written = [subprocess.run([sys.executable, "-m", *page.split()], cwd=root) for page in (times, *PAGES)]
    return not any(done.returncode for done in written)


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.record`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the evidence-*.jsonl of the runs")
    parser.add_argument("--commit", action="store_true", help="commit records, results and pages")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    folder = take_over(options.folder, options.root)
    records = write(folder)
    fine = write_pages(folder, options.root)
    show(records[-1])
    if not fine:
        print("record: a page cannot be written: nothing is committed", file=sys.stderr)
    elif options.commit:
        said = f"What {folder.name} measured and verified at {records[-1]['commit']}"
        for words in (["add", "benchmarks/results", "docs"], ["commit", "--quiet", "--message", said]):
            subprocess.run(["git", *words], cwd=options.root, check=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

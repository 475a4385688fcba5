"""The CPU kernels under AddressSanitizer with UBSan: the op tests of `make sanitize`, and random calls.

Every instruction set is tested. Each test file runs by itself, and its counts go into build/sanitize-…/counted.json at once: a
run that was interrupted goes on where it stopped, as long as library and file are the same. A sanitizer that finds anything
ends the process, and nothing of that file is counted. ThreadSanitizer, many times as slow, runs in `make sanitize` alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ROOT

SANITIZER = "address,undefined"
CALLS = 800


def measure() -> dict[str, Any]:
    """Files, tests that passed, and random calls; the files in which something was found or a test failed."""
    from sanitize import build
    from sanitize.__main__ import op_tests, pytest_of, random_calls

    folder = build(SANITIZER)
    library, record = _digest(folder / "pass_ext" / "_C.so"), folder / "counted.json"
    kept = json.loads(record.read_text()) if record.exists() else {}
    if kept.get("library") != library:
        kept = {"library": library, "files": {}}
    wrong = []
    for file in op_tests():
        name, digest = str(file.relative_to(ROOT)), _digest(file)
        if kept["files"].get(name, {}).get("digest") == digest:
            continue
        status, output = _run(pytest_of(SANITIZER, [file]))
        tests = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed)", output[-200:])}
        print(name, status, tests, flush=True)
        if status not in (0, 5):  # 5: no test was chosen
            wrong.append(name)
            print(output[-3000:], flush=True)
            continue
        kept["files"][name] = {"digest": digest, "passed": tests.get("passed", 0)}
        record.write_text(json.dumps(kept, indent=1) + "\n")
    status, output = _run(random_calls(CALLS))
    return {
        "sanitizer": SANITIZER,
        "files": len(kept["files"]),
        "passed": sum(file["passed"] for file in kept["files"].values()),
        "wrong": wrong if status == 0 else [*wrong, "random calls"],
        "random calls": counted(output)["calls"] if status == 0 else 0,
    }


def counted(output: str) -> dict[str, Any]:
    """The counts of an output of fuzz_ops.py."""
    of_ops = re.findall(r"^\w+: (\d+) results, (\d+) refusals$", output, re.MULTILINE)
    total = re.search(r"^(\d+) calls as they should be, (\d+) not$", output, re.MULTILINE)
    if total is None:
        raise ValueError(f"fuzz_ops.py must end with its counts, got {output[-300:]!r}")
    results, refusals = (sum(int(counts[i]) for counts in of_ops) for i in (0, 1))
    return {
        "ops": len(of_ops),
        "calls": int(total[1]),
        "results": results,
        "refusals": refusals,
        "wrong": int(total[2]),
    }


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _run(command: list[object]) -> tuple[int, str]:
    from sanitize import run

    with tempfile.TemporaryFile("w+") as output:
        status = run(SANITIZER, *command, output=output)
        output.seek(0)
        return status, output.read()

"""The CPU kernels under AddressSanitizer with UBSan, and under ThreadSanitizer: op tests and random calls, as `make sanitize`.

A sanitizer that finds anything ends the process, so what is counted here was clean.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

from benchmarks import ROOT
from benchmarks.trust.random import counted

CALLS = 800


def measure() -> dict[str, Any]:
    """For each sanitizer: tests that passed, that failed, and the counts of random calls."""
    from sanitize import SANITIZERS

    rows = []
    for sanitizer in SANITIZERS:
        command = [sys.executable, "-m", "sanitize", sanitizer, "--calls", str(CALLS)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        tests = re.findall(r"(\d+) (passed|failed)", done.stdout.rpartition(" in ")[0].rpartition("\n")[2])
        rows.append(
            {"sanitizer": sanitizer, "clean": done.returncode == 0}
            | {word: int(count) for count, word in tests}
            | {"random calls": counted(done.stdout)["calls"]}
        )
    return {"rows": rows}

"""Random calls of every op: right, odd and wrong arguments, made by tests/sanitize/fuzz_ops.py in the ordinary build."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from benchmarks import ROOT

CALLS = 4000


def measure() -> dict[str, Any]:
    """Calls, results compared with the reference, refusals, and calls that were wrong."""
    command = [
        sys.executable,
        ROOT / "tests/sanitize/fuzz_ops.py",
        "--calls",
        str(CALLS),
        "--seconds",
        "900",
        "--seed",
        "1",
    ]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    print(*re.findall(r"^WRONG: .*", output, re.MULTILINE), sep="\n")
    return counted(output)


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

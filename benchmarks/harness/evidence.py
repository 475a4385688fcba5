"""Evidence of a GPU run: a file of JSON lines, one fact each, appended as soon as the fact is known.

    {"kind": "run" | "stage" | "test" | "bench" | "text", "at": seconds since 1970, …}

Every process of a run appends to the same file. A fact is one write to a file opened for appending, so lines of several
processes do not mix. A process that is killed while it writes leaves half a line; the next fact begins a new line, and `read`
skips the half. No line is rewritten or deleted. Each run has its own file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PATH = "PASS_EXT_EVIDENCE"
"""The environment variable with the path of a run's evidence file."""

Fact = dict[str, Any]


def add(path: str | Path, kind: str, **facts: Any) -> None:
    """Appends one fact."""
    line = json.dumps({"kind": kind, "at": round(time.time(), 3), **facts})
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, f"\n{line}\n".encode())
    finally:
        os.close(handle)


def add_here(kind: str, **facts: Any) -> None:
    """Appends one fact to the evidence file of this process's run; outside of a run it does nothing."""
    if path := os.environ.get(PATH):
        add(path, kind, **facts)


def read(path: Path) -> Iterator[Fact]:
    """The facts of one file, in order."""
    for line in path.read_bytes().splitlines():
        try:
            fact = json.loads(line)
        except ValueError:  # an empty line, or half a line
            continue
        if isinstance(fact, dict) and "kind" in fact:
            yield fact


def run_of(path: Path) -> Fact:
    """The first fact, what ran on which machine; {} in a file that was cut off before it."""
    return next((fact for fact in read(path) if fact["kind"] == "run"), {})


def outcomes(facts: Iterable[Fact], stage: str) -> dict[str, str]:
    """Test id -> "passed", "nothing" (without a tensor on the GPU), "skipped", "failed", "cut off" by the end of the run, or
    "begun" where no end is known."""
    return {fact["id"]: fact["outcome"] for fact in facts if fact["kind"] == "test" and fact["stage"] == stage}


def of_commit(folder: Path, commit: str) -> list[Path]:
    """Evidence files of this commit's runs, oldest first; none for a working tree that differs from its commit."""
    if commit == "unknown" or commit.endswith("-dirty"):
        return []
    files = [path for path in sorted(folder.glob("evidence-*.jsonl")) if run_of(path).get("commit") == commit]
    return sorted(files, key=lambda path: run_of(path)["at"])

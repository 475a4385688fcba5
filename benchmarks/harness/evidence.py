"""Evidence of a GPU run: a file of JSON lines, one fact each, appended as soon as the fact is known.

    {"kind": "run" | "stage" | "test" | "bench" | "text", "at": seconds since 1970, …}

Every process of a run appends to the same file. A fact is one write to a file opened for appending, so lines of several
processes do not mix. A process that is killed while it writes leaves half a line; the next fact begins a new line, and `read`
skips the half. No line is rewritten or deleted. Each run has its own file. A result that grows is appended row by row: a run
that wrote it whole each time would leave 25 MB, and a lent machine gives back files of 16 MiB.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PATH = "PASS_EXT_EVIDENCE"
"""The environment variable with the path of a run's evidence file."""
EARLIER = "PASS_EXT_EARLIER"
"""The environment variable with a folder of further evidence, of earlier runs on other machines."""
ROOMY = 12 << 20
"""Bytes of a file from which on its facts keep the ends alone of what is long: it stays below 16 MiB."""
LONG, END = ("text", "reason"), 200
_written: dict[str, dict[str, Any]] = {}  # result file -> the result, as this process last wrote it

Fact = dict[str, Any]


def add(path: str | Path, kind: str, **facts: Any) -> None:
    """Appends one fact."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.fstat(handle).st_size > ROOMY:
            facts |= {name: facts[name][-END:] for name in LONG if name in facts}
        line = json.dumps({"kind": kind, "at": round(time.time(), 3), **facts})
        os.write(handle, f"\n{line}\n".encode())
    finally:
        os.close(handle)


def add_here(kind: str, **facts: Any) -> None:
    """Appends one fact to the evidence file of this process's run; outside of a run it does nothing."""
    if path := os.environ.get(PATH):
        add(path, kind, **facts)


def add_result(file: str, result: Mapping[str, Any]) -> None:
    """Appends what is new in a result since this process's last call for its file: changed values, further items of lists."""
    whole, before = json.loads(json.dumps(result)), _written.get(file)
    changed, more = {}, {}
    for name, value in whole.items():
        was = (before or {}).get(name)
        if isinstance(was, list) and isinstance(value, list) and value[: len(was)] == was:
            more |= {name: value[len(was) :]} if len(value) > len(was) else {}
        elif before is None or value != was:
            changed[name] = value
    add_here("bench", file=file, begins=before is None, changed=changed, more=more)
    _written[file] = whole


def results(facts: Iterable[Fact]) -> dict[str, dict[str, Any]]:
    """Result file -> the result of the last process that wrote it, as far as it came."""
    found: dict[str, dict[str, Any]] = {}
    for fact in facts:
        if fact["kind"] == "bench":
            result = {} if fact["begins"] else found.get(fact["file"], {})
            result |= fact["changed"]
            result |= {name: result.get(name, []) + items for name, items in fact["more"].items()}
            found[fact["file"]] = result
    return found


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


def of_same_commit(path: Path) -> list[Path]:
    """Evidence files of the commit of this one, beside it and in ``$PASS_EXT_EARLIER``, oldest first; none for a working tree
    that differs from its commit."""
    commit = run_of(path).get("commit", "unknown")
    if commit == "unknown" or commit.endswith("-dirty"):
        return []
    folders = [path.parent, *map(Path, filter(None, [os.environ.get(EARLIER)]))]
    files = [
        file for folder in folders for file in folder.glob("evidence-*.jsonl") if run_of(file).get("commit") == commit
    ]
    return sorted(files, key=lambda file: run_of(file)["at"])

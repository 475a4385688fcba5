"""Planted faults: what became of them, from the results of `python -m tests.mutation`, and the faults that no test noticed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import ROOT

RESULTS = ROOT / "build" / "mutation" / "results.json"
PLANNED = 200  # by `make mutants`
REASONS: dict[str, str] = {}
"""Fault -> why no test notices it."""


def measure(file: Path = RESULTS) -> dict[str, Any]:
    """Counts by folder and by outcome, and the survivors."""
    found = json.loads(file.read_text())
    faults = {key: one["result"] for key, one in found.items() if not key.startswith("as it is")}
    folders: dict[str, Counter[str]] = {}
    for fault, outcome in faults.items():
        folders.setdefault(fault.partition(":")[0].rpartition("/")[0], Counter())[outcome] += 1
    survived = sorted(fault for fault, outcome in faults.items() if outcome == "survived")
    return {
        "planned": PLANNED,
        "folders": {folder: dict(sorted(counts.items())) for folder, counts in sorted(folders.items())},
        "survivors": [{"fault": fault, "why": REASONS.get(fault, "not examined")} for fault in survived],
    }

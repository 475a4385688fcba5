"""Planted faults: what became of them, from the results of `python -m tests.mutation`, and the faults that no test noticed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import ROOT

RESULTS = ROOT / "build" / "mutation" / "results.json"
PLANNED = 200  # by `make mutants`
_FACTORS = "equivalent: factors of a product in another order"
REASONS: dict[str, str] = {
    "csrc/core/elementary-inl.h:81:15 'sum, f' -> 'f, sum'": _FACTORS,
    "csrc/cpu/adapter_kernels-inl.h:19:76 'a, b' -> 'b, a'": _FACTORS,
    "pass_ext/decoding/loop/device_step.py:85:70 '1' -> '2'": "equivalent: a column more, which no step writes",
    "pass_ext/decoding/models/latents.py:140:84 '0, 1' -> '1, 0'": "equivalent: two dimensions swap places either way",
    "pass_ext/decoding/session/reading.py:80:64 'a, b' -> 'b, a'": "equivalent: equality of two texts, either way round",
}
"""Fault -> why no test notices it."""


def measure(file: Path = RESULTS) -> dict[str, Any]:
    """Counts by folder and by outcome, and the survivors."""
    faults = {key: one["result"] for key, one in json.loads(file.read_text()).items()}
    folders: dict[str, Counter[str]] = {}
    for fault, outcome in faults.items():
        folders.setdefault(fault.partition(":")[0].rpartition("/")[0], Counter())[outcome] += 1
    survived = sorted(fault for fault, outcome in faults.items() if outcome == "survived")
    return {
        "planned": PLANNED,
        "folders": {folder: dict(sorted(counts.items())) for folder, counts in sorted(folders.items())},
        "survivors": [{"fault": fault, "why": REASONS.get(fault, "not examined")} for fault in survived],
    }

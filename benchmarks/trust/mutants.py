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
_HOLE = "a hole, mended since: "
_ROW = "noticed by test_hybrid_models, since then in its row"
REASONS: dict[str, str] = {
    "csrc/core/accept_walk.h:361:20 '1' -> '2'": "equivalent: any negative number says that there is no child",
    "csrc/core/elementary-inl.h:81:15 'sum, f' -> 'f, sum'": _FACTORS,
    "csrc/core/recurrent-inl.h:27:16 'key, u' -> 'u, key'": _FACTORS,
    "csrc/cpu/adapter_kernels-inl.h:19:76 'a, b' -> 'b, a'": _FACTORS,
    "csrc/cpu/attention_kernels-inl.h:277:23 '0' -> '1'": "equivalent: a first turn of no keys",
    "csrc/cpu/rows.cpp:72:43 '1' -> '2'": "equivalent: a slice more, which counts as finite",
    "csrc/cpu/rows_kernels-inl.h:213:22 'weight, exponent' -> 'exponent, weight'": _FACTORS,
    "pass_ext/decoding/drafting/heads/keep_mtp.py:46:50 'names, _FILE' -> '_FILE, names'": _HOLE + "an index of files",
    "pass_ext/decoding/drafting/slot_tokens.py:232:97 '1' -> '2'": "equivalent: a column more, which nothing reads",
    "pass_ext/decoding/loop/device_step.py:85:70 '1' -> '2'": "equivalent: a column more, which no step writes",
    "pass_ext/decoding/models/latents.py:140:84 '0, 1' -> '1, 0'": "equivalent: two dimensions swap places either way",
    "pass_ext/decoding/models/module_ops.py:101:21 '4' -> '5'": "a tolerance: no known module is wrong by 4 to 5 roundings",
    "pass_ext/decoding/models/row_attention.py:433:51 '2' -> '3'": "equivalent: numbers are 0 or the least",
    "pass_ext/decoding/models/row_attention.py:435:61 'above, 0' -> '0, above'": _HOLE + "causal masks",
    "pass_ext/decoding/models/shadow.py:210:36 'self._of, value' -> 'value, self._of'": _HOLE + "lists of modules",
    "pass_ext/decoding/models/transformers.py:330:85 'and' -> 'or'": _ROW,
    "pass_ext/decoding/models/vocabulary.py:65:33 'logits, k' -> 'k, logits'": _HOLE + "whole columns",
    "pass_ext/decoding/session/reading.py:80:64 'a, b' -> 'b, a'": "equivalent: equality of two texts, either way round",
    "pass_ext/decoding/session/session.py:277:32 'self.states, states' -> 'states, self.states'": _ROW,
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

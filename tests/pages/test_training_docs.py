"""docs/guide/training.md: the rows of trained heads have the numbers of their records."""

import json
import re

import pytest
from support.paths import ROOT

PAGE = ROOT / "docs/guide/training.md"
_RECORD = re.compile(r"\(\.\./\.\./(benchmarks/results/pretrained/[\w-]*eagle3[\w-]*\.json)\)")

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="an sdist has no results")


def row_of(record):
    """Steps, tokens of text, the first step's loss, the mean of the last 25, and tokens a call."""
    losses, found = record["losses"], record["evaluation"]
    tokens = round(int(record["data"]["read"].split()[0].replace(",", "")), -3)
    rates = (found["tokens_per_call"], *(found["by_kind"][kind] for kind in ("chat", "prose", "python")))
    cells = [str(record["steps"]), f"{tokens:,} tokens", f"{losses[0]:.2f}", f"{sum(losses[-25:]) / 25:.2f}"]
    return " | ".join([*cells, *(f"{rate:.2f}" for rate in rates)])


def test_the_rows_of_trained_heads_are_their_records():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| [") and _RECORD.search(line)]
    assert len(rows) == len(list((ROOT / "benchmarks/results/pretrained").glob("*eagle3*.json")))
    for row in rows:
        record = json.loads((ROOT / _RECORD.search(row)[1]).read_text())
        assert row.endswith(f"| {row_of(record)} |")

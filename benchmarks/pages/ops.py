"""Renders the README.md of a results folder: the tables of the op benchmarks, from ops/*.json."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import aims, table
from benchmarks.harness.results import (
    LEFT_OUT,
    cache_of,
    contender_names,
    described,
    gain_cells,
    gain_heads,
    lines_of,
    provenance_of,
    why_absent,
    with_spread,
)

HEADER = """# The ops on this machine

Written by `python -m benchmarks.pages` from `ops/*.json` beside this page; do not edit. How they are measured, and which
times count: [benchmarks/README.md](../../README.md). Whole texts: [performance](../../../docs/performance.md).

Microseconds per call, median (10th–90th percentile). *gain*: the fastest other way that does the same job ÷ ours. Ways
in italics do another job and are shown for comparison. *GB/s* counts the fewest bytes that one call must move. *of copy*
divides it by the bandwidth of a large copy in the same run, *of read* by that of reading a large buffer; *of limit* divides
the least possible time by ours.
"""


def render(result: dict[str, Any]) -> str:
    """A result as a section of the page."""
    names = contender_names(result)
    same_job = {row["contender"]: row["same_job"] for row in result["rows"]}
    labels = list(result["rows"][0]["labels"])
    heads = [*labels, "cache", *(name if same_job[name] else f"*{name}*" for name in names), *gain_heads(result)]
    left = len(labels) + 1
    rows = []
    for line in lines_of(result):
        by_name = {row["contender"]: row for row in line}
        cells = [*(str(line[0]["labels"][label]) for label in labels), cache_of(line[0])]
        cells += [with_spread(by_name.get(name)) for name in names]
        rows.append([*cells, *gain_cells(line, result)])
    out = [f"## {described(result)}", "", provenance_of(result), "", *table(heads, rows, left)]
    if result.get("left_out"):
        out += ["", f"{LEFT_OUT}: {'; '.join(result['left_out'])}."]
    out += [line for sentence in why_absent(result) for line in ("", sentence)]
    if result["aims"]:
        out += ["", *aims(result)]
    return "\n".join([*out, ""])


def render_page(paths: Iterable[Path]) -> str:
    """The page of a folder, from its result files; quick runs are left out."""
    results = [json.loads(path.read_text()) for path in sorted(paths)]
    return "\n".join([HEADER, *(render(result) for result in results if not result["quick"])])


def pages(root: Path) -> dict[Path, str]:
    """Path -> text of the page, for each results folder with op results."""
    folders = sorted({path.parent.parent for path in root.glob("benchmarks/results/*/ops/*.json")})
    return {folder / "README.md": render_page((folder / "ops").glob("*.json")) for folder in folders}

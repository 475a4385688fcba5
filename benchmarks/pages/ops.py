"""The README.md of a results folder: the tables of its op benchmarks, from ops/*.json."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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

Written by `python -m benchmarks.pages` from `ops/*.json` beside this page; do not edit. How they are measured, and what is and
is not counted: [benchmarks/README.md](../../README.md). Whole texts: [decoding.md](decoding.md), where they were measured.

Microseconds per call, median (10th–90th percentile). *gain*: the fastest other way that does the same job ÷ ours. Ways
in italics do not do the same job and are there for comparison. *GB/s* counts the fewest bytes that ours must move;
*of copy* is that over the bandwidth of a large copy in the same run, *of read* over that of reading a large buffer.
"""


def render(result: dict[str, Any]) -> str:
    """The result as a section of Markdown."""
    names = contender_names(result)
    same_job = {row["contender"]: row["same_job"] for row in result["rows"]}
    labels = list(result["rows"][0]["labels"])
    heads = [*labels, "cache", *(name if same_job[name] else f"*{name}*" for name in names), *gain_heads(result)]
    left = len(labels) + 1
    out = [f"## {described(result)}", "", provenance_of(result), ""]
    out += [_markdown_row(heads), _markdown_row(["---"] * left + ["---:"] * (len(heads) - left))]
    for line in lines_of(result):
        by_name = {row["contender"]: row for row in line}
        cells = [*(str(line[0]["labels"][label]) for label in labels), cache_of(line[0])]
        cells += [with_spread(by_name.get(name)) for name in names]
        out.append(_markdown_row([*cells, *gain_cells(line, result)]))
    if result.get("left_out"):
        out += ["", f"{LEFT_OUT}: {'; '.join(result['left_out'])}."]
    out += [line for sentence in why_absent(result) for line in ("", sentence)]
    if result["aims"]:
        out += ["", "| aim | | measured |", "| --- | --- | --- |"]
        words = {True: "met", False: "**not met**", None: "not tested"}
        out += [_markdown_row([aim["aim"], words[aim["met"]], aim["measured"]]) for aim in result["aims"]]
    return "\n".join([*out, ""])


def render_page(paths: Iterable[Path]) -> str:
    """The whole page of one folder, from its result files; quick runs are no results."""
    found = [json.loads(path.read_text()) for path in sorted(paths)]
    return "\n".join([HEADER, *(render(result) for result in found if not result["quick"])])


def pages(root: Path) -> dict[Path, str]:
    """The page of each results folder that has op results: its path and text."""
    folders = sorted({path.parent.parent for path in root.glob("benchmarks/results/*/ops/*.json")})
    return {folder / "README.md": render_page((folder / "ops").glob("*.json")) for folder in folders}


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"

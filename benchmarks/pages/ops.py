"""The op benchmarks on pages, from ops/*.json: ``render`` shows every line, the README.md of a results folder the gains."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import template
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


def render(result: dict[str, Any]) -> str:
    """A result with every line. Microseconds per call, median (10th–90th percentile); gain: the fastest other way that does the
    same job ÷ ours; the shares of a copy, of reading and of the limit are those of the same run."""
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
    return "\n".join([*out, *_end(result), ""])


def summary(result: dict[str, Any], file: str) -> str:
    """A result as a section of the page: the gains over each other way, by state of the caches."""
    ours, *others = contender_names(result)
    found: dict[tuple[str, str], list[float]] = {}
    for row in result["rows"]:
        if row["contender"] != ours and row["median_us"] is not None:
            found.setdefault((row["contender"], cache_of(row)), []).append(row["times_ours"])
    is_other_job = {row["contender"] for row in result["rows"] if not row["same_job"]}
    order = sorted(found, key=lambda key: others.index(key[0]))
    rows = [
        [f"*{name}*" if name in is_other_job else name, cache, str(len(found[name, cache]))]
        + [f"{of(found[name, cache]):.2f}" for of in (min, median, max)]
        for name, cache in order
    ]
    heads = ["other way", "cache", "lines", "least", "median", "most"]
    link = f"Every line: [{file.rpartition('/')[2]}]({file})."
    return "\n".join(
        [
            f"## {described(result)}",
            "",
            provenance_of(result),
            "",
            *table(heads, rows, left=2),
            "",
            link,
            *_end(result),
            "",
        ]
    )


def _end(result: dict[str, Any]) -> list[str]:
    """What was not timed and why, and the aims."""
    out = ["", f"{LEFT_OUT}: {'; '.join(result['left_out'])}."] if result.get("left_out") else []
    out += [line for sentence in why_absent(result) for line in ("", sentence)]
    return [*out, "", *aims(result)] if result["aims"] else out


def render_page(paths: Iterable[Path]) -> str:
    """The page of a folder, from its result files; quick runs are left out."""
    results = [(f"ops/{path.name}", json.loads(path.read_text())) for path in sorted(paths)]
    return template.page(
        __file__, {}, results=[summary(result, file) for file, result in results if not result["quick"]]
    )


def pages(root: Path) -> dict[Path, str]:
    """Path -> text of the page, for each results folder with op results."""
    folders = sorted({path.parent.parent for path in root.glob("benchmarks/results/*/ops/*.json")})
    return {folder / "README.md": render_page((folder / "ops").glob("*.json")) for folder in folders}

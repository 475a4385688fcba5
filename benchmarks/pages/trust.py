"""Writes docs/trust.md: what the checks of this repository found, from benchmarks/results/trust/*.json and the GPU's records.

`python -m benchmarks.pages.trust` writes the page, `--check` compares it and writes nothing. `python -m benchmarks.trust NAME`
measures a part again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import template
from benchmarks.harness.markdown import table
from benchmarks.pages import gpu_status

PAGE, RESULTS = Path("docs/trust.md"), Path("benchmarks/results/trust")
OUTCOMES = ("killed", "timed out", "survived", "same code", "does not compile")


def render(root: Path) -> str:
    """The page."""
    results = {path.stem: json.loads(path.read_text()) for path in (root / RESULTS).glob("*.json")}
    fields = faults(results["mutants"]) | branches(results["coverage"])
    return template.page(
        __file__,
        fields,
        results=results,
        made={name: measured(name, result) for name, result in results.items()},
        laws=laws(results["laws"]),
        errors=errors(results["errors"]),
        bits=bits(results["bits"]),
        isas=", ".join(results["bits"]["isas"]),
        found=", ".join(f"`{name}`" for name in results["sanitized"]["wrong"]) or "nothing",
        last=last_run(gpu_status.read_records(root)[-1]),
        texts=[
            line
            for path in sorted(root.glob("benchmarks/results/*/texts.json"))
            for line in texts_on_gpu(json.loads(path.read_text()))
        ],
    )


def measured(name: str, result: dict[str, Any]) -> str:
    """The sentence below a part: command, date, commit and processor."""
    note = f" {result['note']}" if "note" in result else ""
    return (
        f"`python -m benchmarks.trust {name}`, {result['date'][:10]}, commit {result['commit']}, {result['cpu']}.{note}"
    )


def laws(result: dict[str, Any]) -> list[str]:
    """Accept rules enumerated."""
    heads = ["rule", "problems", "outcomes", "largest error", "of the compiled walk", "largest error"]
    rows = [
        [
            f"`{row['rule']}`",
            *(f"{row[key]:,}" for key in ("problems", "outcomes")),
            f"{row['error']:.0e}",
            f"{row['compiled outcomes']:,}",
            f"{row['compiled error']:.0e}",
        ]
        for row in result["rows"]
    ]
    return table(heads, rows)


def errors(result: dict[str, Any]) -> list[str]:
    """Errors of attention and products."""
    heads = ["op", "type", "problems", "worst ratio", "where", "NMSE", "PyTorch's NMSE"]
    rows = [
        [
            f"`{row['op']}`",
            row["dtype"],
            str(row["problems"]),
            f"{row['ratio']:.2f} ×",
            row["at"],
            f"{row['nmse']:.1e}",
            f"{row['plain nmse']:.1e}",
        ]
        for row in result["rows"]
    ]
    return table(heads, rows, left=2)


def bits(result: dict[str, Any]) -> list[str]:
    """What must not change a bit."""
    rows = [[name, str(one["compared"]), str(one["differ"])] for name, one in result["compared"].items()]
    return table(["compared", "pairs", "different"], rows)


def faults(result: dict[str, Any]) -> dict[str, Any]:
    """Planted faults and the survivors."""
    total = sum(map(Counter, result["folders"].values()), Counter())
    rows = [[name, *(str(counts.get(one, 0)) for one in OUTCOMES)] for name, counts in result["folders"].items()]
    rows.append(["all", *(str(total[one]) for one in OUTCOMES)])
    noticed, tried, planned = total["killed"] + total["timed out"], sum(total.values()), result["planned"]
    real = noticed + total["survived"]
    left = (
        f" {tried} of the {planned} planned were tried; the run continues where it stopped." if tried < planned else ""
    )
    return {
        "noticed": noticed,
        "real": real,
        "share": noticed / real,
        "left": left,
        "faults": "\n".join(table(["folder", *OUTCOMES], rows)),
        "survivors": "\n".join(f"- `{one['fault']}`: {one['why']}" for one in result["survivors"]),
    }


def branches(result: dict[str, Any]) -> dict[str, Any]:
    """Branches of csrc/core."""
    files = [row for row in result["files"] if row["branches"]]
    total, taken = (sum(row[key] for row in files) for key in ("branches", "taken"))
    rows = [[row["file"], str(row["branches"]), str(row["taken"])] for row in files]
    reasons: dict[str, list[str]] = {}
    for row in files:
        for one in row["missed"]:
            place = f"`{row['file']}:{one['line']}`, {one['branches']} of `{one['text']}`"
            reasons.setdefault(one["why"], []).append(place)
    missed = [
        f"- {why}: {'; '.join(places)}" for why, places in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    return {
        "taken": taken,
        "branches": total,
        "part": taken / total,
        "headers": "\n".join(table(["header", "branches", "taken"], [*rows, ["all", str(total), str(taken)]])),
        "missed": "\n".join(missed),
    }


def last_run(record: dict[str, Any]) -> str:
    """What a GPU has verified last."""
    kernels = record["kernels"]
    every = kernels["primitives.cuh"]  # which every kernel file includes
    checked = "".join(f", {count} of them under {tool}" for tool, count in every["sanitized"].items())
    return (
        f"The last run was on an {record['machine']['gpu']['name']} on {record['date'][:10]}, commit {record['commit']}: "
        f"{every['tests_passed']:,} tests of {len(kernels)} kernel files passed{checked}, {every['tests_failed']} failed."
    )


def texts_on_gpu(result: dict[str, Any]) -> list[str]:
    """Texts of every method on a GPU."""
    same = [name for name, outcome in result["models"].items() if outcome == "same"]
    rows = [
        [
            line["method"] + ", batch-invariant" * line.get("batch_invariant", False),
            str(line["together"]),
            f"{line['differing']} of {line['texts']}",
        ]
        for line in result["bits"]
    ]
    return [
        f"Texts, {result['machine']['gpu']['name']}. In float32 {len(same)} of {len(result['models'])} tiny models, one for "
        f"each kind of layer ({', '.join(same)}), write there by every method the greedy texts that Plain writes on the CPU, "
        "and by Plain, PaSS and MultiCandidate its sampled ones. In bfloat16 the bits of a row depend on the rows beside it, "
        "other than on the CPU. Of a model with random weights, whose best tokens lie close together:",
        "",
        *table(["method", "texts in a call", "other than Plain alone"], rows),
        "",
        f"`python -m benchmarks.gpu.texts`, {result['date'][:10]}, commit {result['commit']}.",
    ]


def main() -> int:
    """Entry point of `python -m benchmarks.pages.trust`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    page, text = options.root / PAGE, render(options.root)
    if not options.check:
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        print(f"{PAGE} does not show benchmarks/results/trust: run python -m benchmarks.pages.trust", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

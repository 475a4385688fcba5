"""The tables of training runs: what was tried, what each gave, and how long it took.
`python -m benchmarks.pages.training_runs NAME=RECORD.json ...` adds what the tables need of records that training wrote to
benchmarks/results/pretrained/runs.json, and writes runs.md; a run that is there under this name is replaced. `--check` compares
the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import by_machine
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page

RESULT = ROOT / "benchmarks/results/pretrained/runs.json"


SETTINGS = (
    "loss",
    "adapter_rank",
    "adapter_learning_rate",
    "learning_rate",
    "transition_learning_rate",
    "deep_learning_rate",
)
OPTIONS = (  # told where a run has them
    "slot_weights",
    "loss_temperature",
    "adapter_kinds",
    "adapter_by_slot",
    "step_dtype",
)


def kept(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """What the table needs of a record."""
    evaluation = record["evaluation"]
    return {
        "name": name,
        "settings": {
            **{name: record["settings"][name] for name in SETTINGS},
            **{name: record["settings"][name] for name in OPTIONS if record["settings"].get(name)},
        },
        "date": record["date"],
        "steps": record["steps"],
        "seconds": record["seconds"],
        "own samples": record["data"]["own samples"],
        "places": evaluation["places"],
        "top 1": [slot["top 1"] for slot in evaluation["slots"]],
        "accepted": evaluation["accepted"],
        "chain by kind": {kind: lengths["chain"] for kind, lengths in evaluation["accepted_by_kind"].items()},
        **(
            {"overlap": evaluation["overlap"], "learned": record["parameters"].split()[0]}
            if "overlap" in evaluation
            else {}
        ),
    }


def _table(runs: list[dict[str, Any]]) -> list[str]:
    """The table of runs with the same places."""
    more = all("overlap" in run for run in runs)
    kinds = list(runs[0]["chain by kind"])
    rows = [
        [
            run["name"],
            str(run["steps"]),
            f"{run['seconds'] / 60:.0f}",
            str(run["places"]),
            " ".join(f"{share:.3f}" for share in run["top 1"]),
            *(f"{run['accepted'][name]:.2f}" for name in ("chain", "tree 8")),
            *(f"{run['chain by kind'][kind]:.2f}" for kind in kinds),
            *([" ".join(f"{share:.3f}" for share in run["overlap"]), run["learned"]] if more else []),
        ]
        for run in runs
    ]
    heads = [
        "run",
        "steps",
        "minutes",
        "places",
        "top 1 of each slot",
        "chain",
        "tree of 8",
        *(f"chain, {kind}" for kind in kinds),
        *(["overlap of each slot", "learned numbers"] if more else []),
    ]
    return list(table(heads, rows))


def render(runs: list[dict[str, Any]]) -> str:
    """The page."""
    places = dict.fromkeys(run["places"] for run in runs)
    tables = [_table([run for run in runs if run["places"] == count]) for count in places]
    notes = []
    for run in runs:
        settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in run["settings"].items())
        notes.append(f"- {run['name']}: {settings}; {run['date'][:10]}, own samples {run['own samples']}")
    return page(__file__, {}, tables=[line for lines in tables for line in (*lines, "")], notes=notes)


def main() -> int:
    """Entry point of `python -m benchmarks.pages.training_runs`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", metavar="NAME=RECORD.json", help="runs to add, or to replace")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    if options.records:
        pairs = [record.partition("=") for record in options.records]
        runs = {run["name"]: run for run in json.loads(RESULT.read_text())}
        runs |= {name: kept(name, json.loads(Path(path).read_text())) for name, _, path in pairs}
        RESULT.write_text(json.dumps(list(runs.values()), indent=1) + "\n")
    return by_machine.say(by_machine.write_page(RESULT, render, check=options.check))


if __name__ == "__main__":
    sys.exit(main())

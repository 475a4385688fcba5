"""How many tokens per call a number of rows allows, by hit rates: those of a shipped file, and others.

tokens per call of the plan with the most that has so many rows (pass_ext/decoding/planning/lookahead_tree.py)

`python -m benchmarks.pages.lookahead.rows_allow` keeps the file's greedy hit rates in
benchmarks/results/pretrained/rows.json, and writes rows.md. `--check` compares the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import ROOT
from benchmarks.harness.markdown import table
from benchmarks.pages.by_machine import write_page
from benchmarks.pages.lookahead.slot_aims import FILE, HITS
from pass_ext.decoding.planning.lookahead_tree import plan
from pass_ext.modules.lookahead import LookaheadEmbedding

RESULT = ROOT / "benchmarks/results/pretrained/rows.json"
ROWS = (8, 12, 16, 32)
MORE = (0.1, 0.2, 0.3)


def with_first(rates: Sequence[Sequence[float]], firsts: Sequence[float]) -> list[list[float]]:
    """The rates with other first candidates: those of the later ranks share what remains as they did before."""
    return [
        [first, *((1 - first) / (1 - level[0]) * rate for rate in level[1:])]
        for level, first in zip(rates, firsts, strict=True)
    ]


def render(result: dict[str, Any]) -> str:
    """The page."""
    rates, firsts = result["greedy hit rates"], [level[0] for level in result["greedy hit rates"]]
    cases = {f"{result['file']}, greedy": firsts, "wanted": list(HITS)}
    cases |= {f"wanted + {more:g}": [hit + more for hit in HITS] for more in MORE}
    lines = [
        [name, " ".join(f"{first:.2f}" for first in some)]
        + [f"{plan(with_first(rates, some), rows=rows).tokens_per_call:.2f}" for rows in ROWS]
        for name, some in cases.items()
    ]
    return "\n".join([
        "# What a number of rows allows",
        "",
        "Written by `python -m benchmarks.pages.lookahead.rows_allow`; do not edit.",
        "",
        "Tokens per call of one pass, as expected of the best plan of so many rows by its hit rates, computed and not "
        "measured: the chance that the first candidate of slots 1 to 4 is right where the path to it is. Candidates of later "
        "ranks share what remains as in the file.",
        "",
        *table(["hit rates", "first candidates", *(f"{rows} rows" for rows in ROWS)], lines, left=2),
        "",
    ])  # fmt: skip


def main() -> int:
    """Entry point of `python -m benchmarks.pages.lookahead.rows_allow`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    if not options.check:
        rates = LookaheadEmbedding.from_pretrained(FILE).greedy_hit_rates
        kept = {"file": FILE, "greedy hit rates": [list(level) for level in rates or ()]}
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    return write_page(RESULT, render, check=options.check)


if __name__ == "__main__":
    sys.exit(main())

"""The page of the accept rules: how many drafts each accepts per step, as a table, and one verified tree as a picture.

`python -m benchmarks.pages.acceptance` measures for about a minute. It writes benchmarks/results/<device>/acceptance.json (in
$PASS_EXT_OUT if that is set), the table of docs/ops/accept.md, and docs/ops/accept-tree.svg, which needs matplotlib.
`--render` writes table and picture again from the committed result. `--check` writes nothing and fails where they differ.
"""

import argparse
import json
import math
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pass_ext
from benchmarks import ROOT
from benchmarks.harness import machine, markdown
from benchmarks.harness.command import provenance
from benchmarks.harness.results import save
from benchmarks.pages import acceptance_picture
from benchmarks.pages.acceptance_means import (
    CASES,
    DRAFT_NOISE,
    REQUESTS,
    SEED,
    SHAPES,
    TARGET_SPREAD,
    TEMPERATURE,
    VOCABULARY,
    errors,
    measure,
)
from pass_ext.ops.common.rules import ACCEPT_RULES

NAME = "benchmarks.pages.acceptance"
PAGE, PICTURE = Path("docs/ops/accept.md"), Path("docs/ops/accept-tree.svg")
FITS = {"block": "chain", "traversal": "tree; on a chain it is block"}  # the other rules: both


def render(result: dict[str, Any]) -> str:
    """The table, and the sentences below it."""
    rows = {(row["shape"], row["rule"], row["drafts"]): row for row in result["rows"]}

    def mean(shape: str, rule: str, mode: str) -> str:
        row = rows.get((shape, rule, mode))
        return "–" if row is None else f"{row['mean_accepted']:.3f}"

    heads = ["rule", "exactness", "needs q", "shape", "must read", "drafts", "error", "chain", "tree"]
    cells = []
    for rule, mode, _, reads in CASES:
        needs_q, fits = "yes" if ACCEPT_RULES[rule].needs_draft_logits else "no", FITS.get(rule, "both")
        means = [mean(shape, rule, mode) for shape in ("chain", "tree")]
        error = f"{result['errors'][rule]:.3f}" if rule in result["errors"] else "0"
        cells.append([f"`{rule}`", pass_ext.RULES[rule], needs_q, fits, reads, f"`{mode}`", error, *means])
    settings, worst = result["settings"], max(row["standard_error"] for row in result["rows"])
    words = (
        "*drafts*: the mode of `draft_sample`. *error*: total variation between the target's distribution and that of the "
        "first token of a step with one draft, computed and not sampled, the mean over pairs of p and q; 0 for exact rules. "
        "*chain*, *tree*: mean accepted drafts of a step, standard error at most "
        f"{math.ceil(worst * 1000) / 1000:.3f}. A chain of {len(settings['shapes']['chain'])} drafts, a tree with branching "
        f"({', '.join(map(str, settings['shapes']['tree']))}); {settings['requests']:,} requests; "
        f"{settings['vocabulary']:,} tokens, temperature {settings['temperature']:g}; logits random for every node: target "
        f"N(0, {settings['target_spread']:g}), draft = target + N(0, {settings['draft_noise']:g}). Measured on "
        f"{result['date'][:10]}, commit {result['commit']}, {result['machine']['cpu']['model']}, "
        f"{result['machine']['kernels']['cpu_isa']}, torch {result['versions']['torch']}, by "
        "[benchmarks/pages/acceptance.py](../../benchmarks/pages/acceptance.py)."
    )
    wrapped = textwrap.wrap(words, 130, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*markdown.table(heads, cells, left=6), "", *wrapped])


def committed_result(root: Path) -> dict[str, Any] | None:
    """The newest benchmarks/results/*/acceptance.json."""
    results = [json.loads(path.read_text()) for path in root.glob("benchmarks/results/*/acceptance.json")]
    return max(results, key=lambda result: result["date"], default=None)


def check(root: Path) -> list[str]:
    """A sentence for each thing that is out of date."""
    result = committed_result(root)
    if result is None:
        return ["there is no benchmarks/results/*/acceptance.json"]
    page, wrong = (root / PAGE).read_text(), []
    if not markdown.has_part(page, NAME, render(result)):
        wrong.append(f"the table in {PAGE} does not show acceptance.json")
    if not acceptance_picture.check(result["story"], root / PICTURE):
        wrong.append(f"{PICTURE} does not show the tree of acceptance.json")
    return wrong


def run(requests: int) -> dict[str, Any]:
    """Measures the means and verifies the tree; the result."""
    begun, load = provenance("acceptance", requests < REQUESTS, "cpu"), os.getloadavg()[0]
    rows, story = measure(requests), acceptance_picture.verify_story()
    wrong = errors(requests)
    return {
        **begun,
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "settings": {
            "seed": SEED,
            "requests": requests,
            "vocabulary": VOCABULARY,
            "target_spread": TARGET_SPREAD,
            "draft_noise": DRAFT_NOISE,
            "temperature": TEMPERATURE,
            "shapes": SHAPES,
            "dtype": "float32",
        },
        "story": story,
        "errors": wrong,
        "rows": rows,
    }


def main() -> int:
    """Entry point of `python -m benchmarks.pages.acceptance`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where page or picture is out of date"
    )
    parser.add_argument("--render", action="store_true", help="measure nothing; write page and picture")
    parser.add_argument("--quick", action="store_true", help="few requests; print the table, write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    if options.check:
        wrong = check(options.root)
        if wrong:
            print("; ".join(wrong), ": run python -m benchmarks.pages.acceptance", sep="", file=sys.stderr)
        return 1 if wrong else 0
    result = committed_result(options.root) if options.render else run(1000 if options.quick else REQUESTS)
    if result is None:
        parser.error("--render: there is no benchmarks/results/*/acceptance.json")
    print(render(result))
    if options.quick:
        return 0
    if not options.render:
        folder = os.environ.get("PASS_EXT_OUT") or options.root / "benchmarks" / "results" / machine.device_slug("cpu")
        save(result, Path(folder) / "acceptance.json")
        if os.environ.get("PASS_EXT_OUT"):
            return 0
    page = options.root / PAGE
    page.write_text(markdown.replace_part(page.read_text(), NAME, render(result)))
    acceptance_picture.draw(result["story"], options.root / PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

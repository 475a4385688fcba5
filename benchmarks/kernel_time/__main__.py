"""Runs steps of one request on the emulator and writes the page of the kernels' times at batch 1.

`python -m benchmarks.kernel_time` records (minutes), saves benchmarks/results/kernel-time/paths.json and writes the page;
`--render` writes it from the saved result, `--check` compares it. `--only TEXT` records the steps whose name contains the text,
and keeps the saved numbers of all others. `--as-measured`, after a run of on_gpu.py at the same commit, saves the counts of the
saved result as those of the kernels that the GPU has measured.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness.machine import now
from benchmarks.kernel_code.measure import commit_of_kernels
from benchmarks.kernel_time import fit, page


def main() -> int:
    """Entry point of `python -m benchmarks.kernel_time`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="record nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    parser.add_argument("--as-measured", action="store_true", help="record nothing; a GPU has run these kernels")
    parser.add_argument("--only", default="", help="a text in the names of the steps to record")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    target = options.root / page.PAGE
    if options.as_measured:
        fit.save_measured_paths(page.read(options.root), options.root)
    elif not (options.render or options.check):
        page.save(record(options.root, options.only), options.root)
    text = page.render(page.read(options.root), page.read_measured(options.root), fit.read_measured_paths(options.root))
    if not options.check:
        target.write_text(text)
        return 0
    if target.exists() and target.read_text() == text:
        return 0
    print(f"{page.PAGE} does not match the result: run python -m benchmarks.kernel_time --render", file=sys.stderr)
    return 1


def record(root: Path, only: str = "") -> dict[str, Any]:
    """The result: the critical paths of every step. ``only``: of the steps whose name contains it; the others are those of the
    saved result.
    """
    from benchmarks.kernel_time.steps import record_all  # builds the emulator

    commit = commit_of_kernels()
    recorded = {(step["kind"], step["name"]): step | {"commit": commit} for step in record_all(only)}
    kept = {(step["kind"], step["name"]): step for step in page.read(root)["steps"]} if only else {}
    return {
        "date": now(),
        "commit": commit,
        "steps": [recorded.get(step, kept.get(step)) for step in {**kept, **recorded}],
    }


if __name__ == "__main__":
    sys.exit(main())

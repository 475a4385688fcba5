"""Runs steps of one request on the emulator and writes the page of estimated microseconds at batch 1.

`python -m benchmarks.kernel_time` records (some ten minutes), saves benchmarks/results/kernel-time/estimates.json and writes
the page; `--render` writes it from the saved result, `--check` compares it. `--only TEXT` records the steps whose name
contains the text, and keeps the saved numbers of all others. `--as-measured`, after a run of on_gpu.py at the same commit,
saves the counts of the saved result as those of the kernels that the GPU has measured.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness.machine import now
from benchmarks.kernel_code.measure import commit_of_kernels
from benchmarks.kernel_code.page import read as read_kernel_code
from benchmarks.kernel_time import fit, page

LIBRARY = Path("pass_ext/_C_cuda.so")
TILES = {"16 rows": "AttentionShape<16-bit, 128, 1>", "64 rows": "AttentionShape<16-bit, 128, 4>"}


def main() -> int:
    """Entry point of `python -m benchmarks.kernel_time`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="record nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    parser.add_argument("--as-measured", action="store_true", help="record nothing; a GPU has run these kernels")
    parser.add_argument("--only", default="", help="a text in the names of the steps to record")
    parser.add_argument(
        "--library", type=Path, default=None, help=f"holds the kernels; by default {LIBRARY} in the root"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    target = options.root / page.PAGE
    if options.as_measured:
        fit.save_measured_paths(page.read(options.root), options.root)
    elif not (options.render or options.check):
        page.save(record(options.root, options.library or options.root / LIBRARY, options.only), options.root)
    text = page.render(page.read(options.root), page.read_measured(options.root), fit.read_measured_paths(options.root))
    if not options.check:
        target.write_text(text)
        return 0
    if target.exists() and target.read_text() == text:
        return 0
    print(f"{page.PAGE} does not match the result: run python -m benchmarks.kernel_time --render", file=sys.stderr)
    return 1


def record(root: Path, library: Path, only: str = "") -> dict[str, Any]:
    """The result: the critical paths of every step, and the ratios and tiles that turn them into times. ``only``: of the steps
    whose name contains it; the others and the ratios are those of the saved result.
    """
    from benchmarks.kernel_time.ratios import measure_merges, measure_ratios  # builds the emulator
    from benchmarks.kernel_time.steps import record_all

    kernel_code = read_kernel_code(root)
    hot = {name: kernel_code["kernels"][f"attention_kernel<{shape}>"]["hot"] for name, shape in TILES.items()}
    tiles = {name: {"instructions": loop["path"], "products": loop["classes"]["matrix"]} for name, loop in hot.items()}
    merges = measure_merges(library)
    steps = record_all({shape: merge.in_flight for shape, merge in merges.items()}, only)
    commit = commit_of_kernels()
    for step in steps:
        step["commit"] = commit
        for launch in (*step["least"], *step["most"]):
            for part in ("whole", "to_atomic", "to_product", "to_last_product"):
                launch[part] = {event: count for event, count in launch[part].items() if count}
    saved = page.read(root) if only else {"steps": []}
    ratios = saved["ratios"] if only else measure_ratios(library, kernel_code)
    recorded = {(step["kind"], step["name"]): step for step in steps}
    kept = {(step["kind"], step["name"]): step for step in saved["steps"]}
    steps = [recorded.get(step, kept.get(step)) for step in {**kept, **recorded}]
    return {
        "date": now(),
        "commit": commit,
        "ratios": ratios,
        "tiles": tiles,
        "merges": {shape: merge._asdict() for shape, merge in merges.items()},
        "steps": steps,
    }


if __name__ == "__main__":
    sys.exit(main())

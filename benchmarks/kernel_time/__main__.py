"""Runs steps of one request on the emulator and writes the page of estimated microseconds at batch 1.

`python -m benchmarks.kernel_time` records (some ten minutes), saves benchmarks/results/kernel-time/<commit>.json and writes the
page; `--render` writes it from the saved results, `--check` compares it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness.machine import now
from benchmarks.kernel_code.measure import commit_of_kernels
from benchmarks.kernel_code.page import read_results as read_kernel_code
from benchmarks.kernel_time import page

LIBRARY = Path("pass_ext/_C_cuda.so")
TILES = {"16 rows": "AttentionShape<16-bit, 128, 1>", "64 rows": "AttentionShape<16-bit, 128, 4>"}


def main() -> int:
    """Entry point of `python -m benchmarks.kernel_time`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="record nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    target = options.root / page.PAGE
    if not (options.render or options.check):
        page.save(record(options.root), options.root)
    text = page.render(page.read_results(options.root))
    if not options.check:
        target.write_text(text)
        return 0
    if target.exists() and target.read_text() == text:
        return 0
    print(f"{page.PAGE} does not match the results: run python -m benchmarks.kernel_time --render", file=sys.stderr)
    return 1


def record(root: Path) -> dict[str, Any]:
    """The result: the critical paths of every step, and the ratios and tiles that turn them into times."""
    from benchmarks.kernel_time.ratios import measure_ratios  # builds the emulator
    from benchmarks.kernel_time.steps import record_all

    kernel_code = read_kernel_code(root)[-1]
    tiles = {name: kernel_code["kernels"][f"attention_kernel<{shape}>"]["hot"]["path"] for name, shape in TILES.items()}
    steps = record_all()
    for step in steps:
        for launch in (*step["least"], *step["most"]):
            for part in ("whole", "to_atomic", "to_product"):
                launch[part] = {event: count for event, count in launch[part].items() if count}
    ratios = measure_ratios(root / LIBRARY, kernel_code)
    return {"date": now(), "commit": commit_of_kernels(), "ratios": ratios, "tiles": tiles, "steps": steps}


if __name__ == "__main__":
    sys.exit(main())

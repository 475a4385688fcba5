"""Writes the pages of every results folder: README.md of the op benchmarks.

`python -m benchmarks.pages` writes; `--check` writes nothing and fails where a page does not show its results; with files of op
results as arguments it prints their tables.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.pages import ops


def main() -> int:
    """Entry point of `python -m benchmarks.pages`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="*", type=Path, help="results of op benchmarks: print their tables, write nothing"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    if options.results:
        print("\n".join(ops.render(json.loads(path.read_text())) for path in options.results))
        return 0
    pages = ops.pages(options.root)
    if not options.check:
        for page, text in pages.items():
            page.write_text(text)
        return 0
    wrong = [
        f"{page.relative_to(options.root)} does not show the ops/*.json beside it"
        for page, text in pages.items()
        if not page.exists() or page.read_text() != text
    ]
    for sentence in wrong:
        print(f"{sentence}: run python -m benchmarks.pages", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line of a program that writes a part of docs/: it writes, or with `--check` compares and writes nothing."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(
    name: str, description: str | None, check: Callable[[Path], str | None], write: Callable[[Path], object]
) -> int:
    """Runs `write`, or `check` with --check; both get the repository's root. Exit status 1: `check` returned a sentence."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    if not options.check:
        write(options.root)
        return 0
    wrong = check(options.root)
    if wrong:
        print(f"{wrong}: run python -m tools.{name}", file=sys.stderr)
    return 1 if wrong else 0

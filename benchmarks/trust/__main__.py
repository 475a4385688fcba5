"""Measures figures of trust: `python -m benchmarks.trust laws errors bits coverage sanitized mutants`.

Each name writes benchmarks/results/trust/NAME.json with date and commit; then `python -m benchmarks.pages.trust` writes the
page.
bits, coverage, sanitized and mutants take minutes to hours, the others a minute or less.
"""

import argparse
import sys
from importlib import import_module

from benchmarks import ROOT
from benchmarks.harness import machine
from benchmarks.harness.results import save

NAMES = ("laws", "errors", "bits", "coverage", "sanitized", "mutants")
FOLDER = ROOT / "benchmarks" / "results" / "trust"


def main() -> int:
    """Entry point of `python -m benchmarks.trust`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    commit = machine.commit()  # before the results change the tree
    for name in parser.parse_args().names:
        begun = {"date": machine.now(), "commit": commit}
        measured = import_module(f"benchmarks.trust.{name}").measure()
        save({**begun, "cpu": machine.describe_cpu()["model"], **measured}, FOLDER / f"{name}.json")
        print(f"written: {FOLDER / name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())

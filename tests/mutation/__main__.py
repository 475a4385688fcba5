"""Plants faults one at a time and tells which of them the tests notice: ``python -m tests.mutation [--faults 200]``.

Files get faults by their length; the choice depends on the seed alone. Every result goes into a JSON file at once, and what is
there is not tried again.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from pathlib import Path

from .faults import Fault, choose, faults_of
from .table import TARGETS
from .trial import ROOT, Trial

CPP_SHARE = 0.35  # of the faults: they must be built


def plan(count: int, seed: int) -> list[tuple[str, Fault]]:
    """So many faults, file by file."""
    chosen = []
    for is_cpp, share in ((False, 1 - CPP_SHARE), (True, CPP_SHARE)):
        found = {
            name: faults_of((ROOT / name).read_text(), not is_cpp) for name in TARGETS if (name[0] == "c") == is_cpp
        }
        total, wanted = sum(map(len, found.values())), round(count * share)
        before = 0
        for name, faults in found.items():  # rounded so that the numbers add up
            here = (before + len(faults)) * wanted // total - before * wanted // total
            before += len(faults)
            chosen += [(name, fault) for fault in choose(faults, here, f"{seed} {name}")]
    return chosen


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--only", nargs="*", default=[""], help="files whose names contain one of these")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutation")
    options = parser.parse_args()
    folder = options.folder.resolve()  # the trial changes its own
    trial, record = Trial(folder), folder / "results.json"
    results = json.loads(record.read_text()) if record.exists() else {}

    # Those of few tests first: most are tried where a run is stopped.
    for name, fault in sorted(plan(options.faults, options.seed), key=lambda one: len(TARGETS[one[0]][1])):
        key = f"{name}:{fault.described((ROOT / name).read_text())}"
        if key not in results and any(part in name for part in options.only):
            outcome, test, used = trial.run(name, fault)
            print(time.strftime("%H:%M:%S"), outcome, key, test, used, sep="  ", flush=True)
            if outcome != "not tried":
                results[key] = {"result": outcome, "by": test, "seconds": used}
                record.write_text(json.dumps(results, indent=1) + "\n")
    print(dict(collections.Counter(one["result"] for one in results.values())))


main()

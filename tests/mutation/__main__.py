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
from .trial import ROOT, Trial, targets

CPP_SHARE = 0.35  # of the faults: they must be built


def plan(count: int, seed: int, only: list[str]) -> list[tuple[str, Fault]]:
    """So many faults, in an order in which files take turns."""
    chosen: list[tuple[int, str, Fault]] = []
    for is_cpp, share in ((True, CPP_SHARE), (False, 1 - CPP_SHARE)):
        names = [name for name in targets() if name.startswith("csrc") == is_cpp]
        found = {name: faults_of((ROOT / name).read_text(), not is_cpp) for name in names}
        total, wanted = sum(map(len, found.values())), round(count * share)
        parts = {name: 1 + int(wanted * len(found[name]) / total) for name in names}
        for name in names:
            own = choose(found[name], parts[name], f"{seed} {name}")
            chosen += [(turn, name, fault) for turn, fault in enumerate(own)]
    chosen.sort(key=lambda one: one[0])
    return [(name, fault) for _, name, fault in chosen[:count] if not only or any(part in name for part in only)]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--only", nargs="*", default=[], help="files whose names contain one of these")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutation")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    record = options.folder / "results.json"
    results: dict[str, dict[str, object]] = json.loads(record.read_text()) if record.exists() else {}
    trial = Trial(options.folder)

    def tried(key: str, name: str, fault: Fault | None, seconds: float) -> dict[str, object]:
        if key not in results:
            outcome, why, used = trial.run(name, fault, seconds)
            results[key] = {"result": outcome, "why": why, "seconds": used}
            record.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            print(time.strftime("%H:%M:%S"), outcome, key, why, used, sep="  ", flush=True)
        return results[key]

    for name, fault in plan(options.faults, options.seed, options.only):
        source = (trial.tree / name).read_text()
        sound = tried(f"as it is: {' '.join(targets()[name][1])}", name, None, 300)
        if sound["result"] != "survived":
            print("skipped: its tests fail without any fault", name, flush=True)
            continue
        before = source[fault.begin : fault.end]
        tried(f"{name}:{fault.line(source)} {fault.operator}: {before!r} -> {fault.text!r}", name, fault, 3 * float(str(sound["seconds"])) + 10)
    counted = collections.Counter(one["result"] for key, one in results.items() if not key.startswith("as it is"))
    print(dict(counted))


main()

"""Everything that needs a GPU, in one run (``make gpu``): tests, sanitizes, measures, profiles, records.

    make gpu                                 all stages
    make gpu MINUTES=10                      the stages that ten minutes hold; the next run does the others
    make gpu STAGES=smoke,tests,memcheck     these stages only
    make gpu FAMILIES=attention,quantize     of tests and sanitizers those of these op families only

Before the first stage the CUDA library is built, or taken as it was carried here (library.py). A run writes every outcome at
once into benchmarks/results/<GPU>/evidence-<time>.jsonl and all output into the .log beside it, so it may be cut off at any
time. Its end, or ``python -m benchmarks.gpu.record FOLDER``, writes verified-<commit>.json and the results of the benchmarks
from the evidence. Exit status 0: every stage passed or cannot run here.

For a machine that is lent for minutes, ``python -m benchmarks.gpu.pack`` packs what it needs and prints the commands.

Environment: PASS_EXT_OUT (another folder, for evidence and log only), PASS_EXT_COMMIT (the commit to record, in place of
git's), PYTHONPATH (a folder of packages to measure beside, such as FlashInfer or vLLM).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import ROOT
from benchmarks.gpu import library, record
from benchmarks.gpu.runner import Runner, Stage
from benchmarks.gpu.stages import all_stages
from benchmarks.harness import evidence, machine


def chosen(stages: Sequence[Stage], names: str) -> list[Stage]:
    """The stages with these comma-separated names, in the order of `stages`; a prefix names all stages that begin with it."""
    prefixes = [name for name in names.split(",") if name]
    unknown = [name for name in prefixes if not any(stage.name.startswith(name) for stage in stages)]
    if unknown:
        raise SystemExit(f"no stage {', '.join(unknown)}; there are {', '.join(stage.name for stage in stages)}")
    return [stage for stage in stages if not prefixes or any(stage.name.startswith(name) for name in prefixes)]


def without_passed(stages: Sequence[Stage], path: Path) -> list[Stage]:
    """The stages; those that passed in an earlier run of this commit cannot run again, except versions and builds."""
    passed = {
        fact["name"]
        for earlier in evidence.of_same_commit(path)
        for fact in evidence.read(earlier)
        if fact["kind"] == "stage" and fact["state"] == "passed"
    } - {"versions", "variants"}
    return [replace(s, impossible="passed in an earlier run") if s.name in passed else s for s in stages]


def begin(folder: Path, how: str) -> Path:
    """Makes a new evidence file with its first fact: commit, machine, versions, kernels, and how the library came here."""
    folder.mkdir(parents=True, exist_ok=True)
    now = machine.now()
    path = folder / f"evidence-{now.replace(':', '').replace('-', '')}.jsonl"
    if path.exists():
        raise SystemExit(f"{path} exists already; wait a second")
    evidence.add(
        path,
        "run",
        date=now,
        commit=machine.commit(),
        machine=machine.describe_machine(),
        versions=machine.describe_versions(),
        kernels=record.describe_kernels(ROOT),
        library=how,
    )
    return path


def main() -> int:
    """Entry point of `python -m benchmarks.gpu`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("MINUTES") or math.inf))
    parser.add_argument("--stages", default=os.environ.get("STAGES", ""), help="comma-separated; default: all")
    parser.add_argument("--families", default=os.environ.get("FAMILIES", ""), help="comma-separated; default: all")
    parser.add_argument(
        "--earlier", type=Path, help="a folder with evidence of earlier runs: what passed there is left out"
    )
    parser.add_argument("--list", action="store_true", help="list the stages and run none")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes - 10  # 10 s for the record
    if not torch.cuda.is_available() and not options.list:
        print("benchmarks.gpu: torch sees no GPU", file=sys.stderr)
        return 1
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else "9.0"
    how = "" if options.list else library.made_ready(capability, seconds=280)
    stages = chosen(all_stages(capability, [name for name in options.families.split(",") if name]), options.stages)
    if options.list:
        for stage in stages:
            print(f"{stage.name:<28} {stage.seconds:>4.0f} s  {stage.impossible or ', '.join(stage.jobs)}")
        return 0
    out = os.environ.pop("PASS_EXT_OUT", "")  # removed: the jobs must not write there
    folder = Path(out) if out else ROOT / "benchmarks" / "results" / machine.device_slug("cuda")
    if options.earlier:
        os.environ[evidence.EARLIER] = str(options.earlier.resolve())
    path = begin(folder, how)
    stages = stages if options.stages else without_passed(stages, path)
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    runner = Runner(path, path.with_suffix(".log"), until)
    fine = runner.run(stages)
    records = record.records(folder) if out else record.write(folder)
    record.show(records[-1])
    print(f"evidence: {path}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

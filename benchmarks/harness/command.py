"""The command line of an op benchmark: options, progress, the table on the screen, and the JSON file.

`run(name, options, make_plan, judge)` measures the cases of a plan. The plan makes them one after the other, so that only the
tensors of one case are in memory.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import ROOT
from benchmarks.harness import cpu_timing, evidence, gpu_timing, machine
from benchmarks.harness.cases import Rates, Row, settings_for
from benchmarks.harness.measure import measure_case
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import FORMAT, LEFT_OUT, save, show

RESULTS = ROOT / "benchmarks" / "results"


def parse(description: str) -> argparse.Namespace:
    """The options that all op benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument(
        "--quick", action="store_true", help="few shapes, a few seconds; writes a file only with --out or $PASS_EXT_OUT"
    )
    parser.add_argument(
        "--out", type=Path, help="result file; default: in $PASS_EXT_OUT, or in benchmarks/results/<device>/"
    )
    parser.add_argument(
        "--seconds", type=float, help="begin no case after this many seconds; the result lists the cases left out"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch must see a GPU, it sees none")
    return options


def provenance(name: str, quick: bool, device: str) -> dict[str, Any]:
    """The first fields of a result: what ran, when, and on what. Call it before the run: the working tree may change."""
    return {
        "bench": name,
        "format": FORMAT,
        "date": machine.now(),
        "commit": machine.commit(),
        "quick": quick,
        "device": device,
        "machine": machine.describe_machine(),
        "versions": machine.describe_versions(),
    }


def run(
    name: str,
    options: argparse.Namespace,
    make_plan: Callable[[argparse.Namespace], Plan],
    judge: Callable[[list[Row]], list[Aim]],
) -> None:
    """Measures every case of the plan, shows the table, judges the aims, and writes the result after every case."""
    begun, load = provenance(name, options.quick, options.device), os.getloadavg()[0]
    console = Console(width=None if sys.stdout.isatty() else 140)
    gpu = machine.describe_gpu() if options.device == "cuda" else None
    cache = (gpu["l2_cache_bytes"] or 64 * 2**20) if gpu else machine.last_level_cache_bytes()
    settings = settings_for(options.device, options.quick, cache)
    timing: Any = gpu_timing if options.device == "cuda" else cpu_timing
    extra: dict[str, Any] = {"dtype": options.dtype, "omp_proc_bind": os.environ.get("OMP_PROC_BIND")}
    if options.device == "cpu":
        extra["clock_overhead_us"] = timing.clock_overhead() * 1e6
    plan = make_plan(options)
    matmul = sorted({options.dtype, "float32"}) if plan.counts_flops else []
    rates = Rates(
        timing.copy_bandwidth(settings, cache),
        timing.read_bandwidth(settings, cache),
        {dtype: timing.matmul_rate(DTYPES[dtype]) for dtype in matmul},
    )

    rows: list[Row] = []
    started = time.monotonic()
    left_out, failed = list(plan.left_out), list[dict[str, str]]()

    def result() -> dict[str, Any]:
        return {
            **begun,
            "load_average": {"before": load, "after": os.getloadavg()[0]},
            "settings": {**asdict(settings), **extra},
            "copy_gb_per_s": rates.copy / 1e9,
            "read_gb_per_s": rates.read / 1e9,
            **({"matmul_gflop_per_s": {key: rate / 1e9 for key, rate in rates.matmul.items()}} if matmul else {}),
            "left_out": left_out,
            **({"failed": failed} if failed else {}),
            "rows": rows,
            "aims": [asdict(aim) for aim in judge(rows)],
        }

    path = result_path(f"ops/{name}", options)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=len(plan.labels))
        cases = iter(plan.cases)
        for index, label in enumerate(plan.labels):
            if options.seconds is not None and time.monotonic() - started > options.seconds and rows:
                left_out += plan.labels[index:]
                break
            progress.update(task, description=f"{name}: {label}")
            try:
                case = next(cases, None)
                if case is None:
                    raise RuntimeError("not made: making an earlier case failed")
                rows += measure_case(case, settings, rates)
            except Exception as error:  # the other cases are still measured
                failed.append({"case": label, "error": f"{type(error).__name__}: {error}"[:2000]})
            # After every case, so that a run that is cut off leaves its rows.
            evidence.add_result(file_name(f"ops/{name}", options), result())
            if path is not None:
                save(result(), path)
            progress.advance(task)
        else:
            assert next(cases, None) is None, "more cases than labels"

    show(result(), console)
    if left_out:
        console.print(f"{LEFT_OUT}: {'; '.join(left_out)}")
    if path is not None:
        save(result(), path)
        console.print(f"written: {path}")
    if failed:
        raise SystemExit("; ".join(f"{name}, {case['case']}: {case['error']}" for case in failed))


def file_name(name: str, options: argparse.Namespace) -> str:
    """The name of a result file: ops/cache.json, or ops/cache-float32.json for a type other than bfloat16."""
    return f"{name}.json" if options.dtype == "bfloat16" else f"{name}-{options.dtype}.json"


def result_path(name: str, options: argparse.Namespace) -> Path | None:
    """The result file: --out, or in $PASS_EXT_OUT, or in benchmarks/results/<device>/. None for a quick run."""
    file = file_name(name, options)
    if options.out:
        return Path(options.out)
    if os.environ.get("PASS_EXT_OUT"):
        return Path(os.environ["PASS_EXT_OUT"]) / file
    return None if options.quick else RESULTS / machine.device_slug(options.device) / file

"""Measures contenders against each other: checks that they agree, runs them interleaved, takes medians.

cpu_timing.py and gpu_timing.py take one sample. benchmarks/README.md says what a sample contains.
"""

import gc
import random
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import torch

from benchmarks.harness import cpu_timing, gpu_timing
from benchmarks.harness.cases import Case, Rates, Row, Sample, Settings


def measure_case(case: Case, settings: Settings, rates: Rates) -> list[Row]:
    """Checks a case, then measures it in every way of the device: a row per way and contender."""
    case.check(case)
    timing = gpu_timing if settings.device == "cuda" else cpu_timing
    rows: list[Row] = []
    with torch.inference_mode():
        for (how, cache), contenders in timing.samplers(case, settings):
            budget = settings.budget_seconds * (3 if cache == "cold" else 1)
            samples = interleave(contenders, settings, budget)
            rows += _summarise(case, how, cache, samples, rates)
    return rows


def interleave(contenders: Mapping[str, Sample], settings: Settings, budget_seconds: float) -> dict[str, list[float]]:
    """Samples all contenders round by round, in a new order each round, until medians are stable or the budget is spent.

    Stable: after at least `fewest_rounds` and a quarter of the budget, the medians of even and odd rounds differ by less than
    1 % for every contender.
    """
    order = list(contenders)
    shuffle = random.Random(settings.seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(2 if settings.quick else 5):
        for sample in contenders.values():
            sample()
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would be charged to the contender that happens to run
    try:
        started = time.perf_counter()
        rounds, next_look = 0, settings.fewest_rounds
        while True:
            shuffle(order)
            for name in order:
                samples[name].append(contenders[name]())
            rounds += 1
            if rounds < next_look:
                continue
            spent = time.perf_counter() - started
            next_look = rounds + max(1, rounds // 8)
            stable = spent >= budget_seconds / 4 and max(map(half_split, samples.values())) < 0.01
            if stable or spent >= budget_seconds or rounds >= settings.most_rounds:
                return samples
    finally:
        if was_enabled:
            gc.enable()


def half_split(samples: Sequence[float]) -> float:
    """The noise of a median: the difference of the medians of even and odd samples, over the median."""
    return abs(median(samples[::2]) - median(samples[1::2])) / median(samples)


def _summarise(case: Case, how: str, cache: str, samples: Mapping[str, list[float]], rates: Rates) -> list[Row]:
    ours = median(samples[case.contenders[0].name])
    moved = case.fewest_bytes
    if moved is not None and not isinstance(moved, int):
        moved = moved[0] if cache == "warm" else round(fmean(moved))
    rows = []
    for contender in case.contenders:
        row: Row = {"labels": dict(case.labels), "how": how, "cache": cache, "contender": contender.name}
        row["same_job"] = contender.same_job
        times = samples.get(contender.name)
        if times is None:
            rows.append({**row, "median_us": None, "reason": "cannot be captured in a CUDA graph"})
            continue
        ordered, middle = sorted(times), median(times)
        row |= {
            "median_us": middle * 1e6,
            "p10_us": ordered[len(ordered) // 10] * 1e6,
            "p90_us": ordered[len(ordered) * 9 // 10] * 1e6,
            "samples": len(ordered),
            "half_split": half_split(times),
            "times_ours": middle / ours,
        }
        if moved is not None:
            speed = moved / middle
            row |= {"fewest_bytes": moved, "gb_per_s": speed / 1e9, "of_copy": speed / rates.copy}
            if case.reads:
                row["of_read"] = speed / rates.read
            if case.fewest_flops is not None:
                row |= {"fewest_flops": case.fewest_flops, "gflop_per_s": case.fewest_flops / middle / 1e9}
                row["of_limit"] = rates.fewest_seconds(moved, case.fewest_flops, case.flops_dtype) / middle
        rows.append(row)
    labels = dict(case.labels)
    for absent, reason in case.absent.items():
        row = {"labels": labels, "how": how, "cache": cache, "contender": absent, "same_job": True}
        rows.append({**row, "median_us": None, "reason": reason})
    return rows

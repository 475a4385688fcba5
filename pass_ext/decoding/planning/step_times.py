"""Measures how long a model call takes at each number of rows on this machine, and keeps the times on disk.

    t(rows): piecewise linear through the medians, never falling, the last slope continued

Times from a busy machine, or with rounds that disagree, are measured again and never kept. Kept times are confirmed once a day.
"""

from __future__ import annotations

import logging
import math
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from pass_ext._library import kernels_hash, status
from pass_ext.decoding.planning.cpu_watch import CpuWatch
from pass_ext.decoding.planning.kept_step_times import FORMAT, KeptTimes

_log = logging.getLogger("pass_ext")
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 15
_ATTEMPTS = 3
_MOST_SPREAD = 0.25  # (median - fastest round) / fastest round, the mean over all numbers of rows
_SPREAD_OF_THE_CLOCK = 1e-4  # seconds by which rounds differ on any machine
_MOST_CHANGE = 0.25  # relative difference between a kept time and the same call today
_CONFIRMING_CALLS = 3


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one call at some numbers of rows.

    A number of rows that took longer than a larger number gets the larger number's time, because disturbances only add time.

    Args:
        rows: ascending, two or more.
        seconds: one for each number of rows.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rows, seconds = tuple(map(int, self.rows)), list(map(float, self.seconds))
        if len(rows) < 2 or rows[0] < 1 or list(rows) != sorted(set(rows)) or len(rows) != len(seconds):
            raise ValueError(
                f"rows must be two or more ascending numbers, one for each of seconds, got {rows}, {seconds}"
            )
        if not all(0 < value < math.inf for value in seconds):
            raise ValueError(f"seconds must be above 0, got {seconds}")
        for index in reversed(range(len(rows) - 1)):
            seconds[index] = min(seconds[index : index + 2])
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "seconds", tuple(seconds))

    def at(self, rows: int) -> float:
        """Seconds of one call at this number of rows; below the smallest measured number, that number's seconds."""
        if rows <= self.rows[0]:
            return self.seconds[0]
        above = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        left, right = self.rows[above - 1 : above + 1]
        low, high = self.seconds[above - 1 : above + 1]
        return low + (high - low) * (rows - left) / (right - left)

    def __str__(self) -> str:
        return ", ".join(f"{r} rows {1e3 * s:.2f} ms" for r, s in zip(self.rows, self.seconds, strict=True))


def measure(
    run: Callable[[int], object],
    rows: Sequence[int] = (1, 2, 4, 8, 16, 24, 32, 48, 64),
    *,
    fingerprint: str | None = None,
    device: torch.device | str = "cpu",
    budget: float = 2.5,
    confirm: bool = False,
) -> StepTimes:
    """Times ``run(rows)`` at each number of rows: medians of rounds that visit all of them, every other one backwards.

    Args:
        run: makes one call with so many rows, on ``device``.
        rows: ascending, two or more.
        fingerprint: identifies the calls: model, sizes, dtype, attention, graphs. With it the result is kept on disk and read
            again, for this device, number of threads, versions of torch and pass_ext, and built kernels. None: never kept.
        device: synchronised before and after each call if it is CUDA.
        budget: seconds to spend, warm-up included, but at least 3 rounds. On a busy machine up to three times as much.
        confirm: kept times are used only if a call still takes as long, however fresh they are.
    """
    device, rows = torch.device(device), tuple(rows)
    if fingerprint is None:
        return StepTimes(rows, _medians(_rounds(run, rows, device, budget)))
    key = _key(fingerprint, rows, device)
    if (known_times := _kept(key, run, rows, device, confirm)) is not None:
        return known_times
    began, attempts = time.perf_counter(), list[tuple[float, ...]]()
    while len(attempts) < _ATTEMPTS:
        watch = CpuWatch()
        rounds = _rounds(run, rows, device, budget)
        use, spread = watch.stop(), _spread(rounds)
        attempts.append(_medians(rounds))
        disturbance = use.disturbance(device) or (f"rounds differ by {spread:.0%}" if spread > _MOST_SPREAD else "")
        if not disturbance:
            times = StepTimes(rows, attempts[-1])
            KeptTimes(key, times.seconds, use, spread, time.time(), time.time()).write()
            return times
        if time.perf_counter() - began > 2 * budget:
            break
    _log.info("step times are used by this process only, not kept: %s (measured %s x)", disturbance, len(attempts))
    # Disturbances only add time, so the shortest attempt is nearest to the truth.
    return StepTimes(rows, tuple(map(min, zip(*attempts, strict=True))))


def _kept(
    key: dict[str, object], run: Callable[[int], object], rows: tuple[int, ...], device: torch.device, confirm: bool
) -> StepTimes | None:
    """The times on disk. After a day, and to confirm them, they are used only if a call still takes as long, or the machine is
    too busy to tell."""
    entry = KeptTimes.read(key, device, _MOST_SPREAD)
    if entry is None:
        return None
    try:
        times = StepTimes(rows, entry.seconds)
    except ValueError as error:
        _log.warning("step times in %s cannot be used, measuring again: %s", entry.path, error)
        return None
    if entry.is_fresh and not confirm:
        return times
    watch = CpuWatch()
    _timed(run, rows[0], device)
    today = sorted(_timed(run, rows[0], device) for _ in range(_CONFIRMING_CALLS))[_CONFIRMING_CALLS // 2]
    change = today / times.seconds[0] - 1
    if abs(change) <= _MOST_CHANGE:
        entry.confirm()
        return times
    if change > 0 and (disturbance := watch.stop().disturbance(device)):
        _log.info("kept step times are used, though a call takes %+.0f %% today: %s", 100 * change, disturbance)
        return times
    _log.info("a call takes %+.0f %% of the time that was kept: measuring again", 100 * change)
    return None


def _rounds(
    run: Callable[[int], object], rows: tuple[int, ...], device: torch.device, budget: float
) -> dict[int, list[float]]:
    """Seconds of each round, by the number of rows."""
    begin = time.perf_counter()
    for count in rows:  # first calls allocate, compile and warm caches
        _timed(run, count, device)
    rounds: dict[int, list[float]] = {count: [] for count in rows}
    for done in range(_MOST_ROUNDS):
        spent = time.perf_counter() - begin
        if done >= _FEWEST_ROUNDS and spent * (done + 2) / (done + 1) > budget:
            break
        for count in rows if done % 2 == 0 else reversed(rows):
            rounds[count].append(_timed(run, count, device))
    return rounds


def _timed(run: Callable[[int], object], rows: int, device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    run(rows)
    _synchronize(device)
    return time.perf_counter() - begin


def _medians(rounds: dict[int, list[float]]) -> tuple[float, ...]:
    return tuple(sorted(seconds)[len(seconds) // 2] for seconds in rounds.values())


def _spread(rounds: dict[int, list[float]]) -> float:
    """(median - fastest) / fastest of the rounds, less the spread of the clock; the mean over all numbers of rows."""
    pairs = zip(_medians(rounds), map(min, rounds.values()), strict=True)
    return sum(max(0.0, median - fastest - _SPREAD_OF_THE_CLOCK) / fastest for median, fastest in pairs) / len(rounds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _key(fingerprint: str, rows: Sequence[int], device: torch.device) -> dict[str, object]:
    try:
        package_version = version("pass_ext")
    except PackageNotFoundError:
        package_version = "0+unknown"
    return {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "rows": list(rows),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "pass_ext": package_version,
        "kernels": kernels_hash(device.type),
        "instructions": status().cpu_isa,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()

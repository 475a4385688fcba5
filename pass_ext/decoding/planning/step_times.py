"""Measures how long a model call takes at each number of rows on this machine, and keeps the times on disk.

    t(rows): piecewise linear through the fastest rounds, never falling, the last slope continued

Other programs only add time: the fastest round is nearest to the truth. The steps themselves correct the rest: step_clock.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from pass_ext._library import kernels_hash, status
from pass_ext.checkpoint import cache_folder

_log = logging.getLogger("pass_ext")
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 15
_FORMAT = 3


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
) -> StepTimes:
    """Times ``run(rows)`` at each number of rows: rounds that visit all of them, every other one backwards.

    Args:
        run: makes one call with so many rows, on ``device``.
        rows: ascending, two or more.
        fingerprint: identifies the calls: model, sizes, dtype, attention, graphs. With it the result is kept on disk and read
            again, for this device, number of threads, versions of torch and pass_ext, and built kernels. None: never kept.
        device: synchronised before and after each call if it is CUDA.
        budget: seconds to spend, warm-up included, but at least 3 rounds.
    """
    device, rows = torch.device(device), tuple(rows)
    key = None if fingerprint is None else _key(fingerprint, rows, device)
    if key is not None and (known := _kept(key)) is not None:
        return known
    times = StepTimes(rows, tuple(map(min, _rounds(run, rows, device, budget).values())))
    if key is not None:
        _keep(key, times)
    return times


def _kept(key: dict[str, object]) -> StepTimes | None:
    """The times on disk; None if there are none or, with a line in the log, if the file is damaged."""
    path = _path(key)
    try:
        entry = json.loads(path.read_text())
        if entry["key"] != key:
            raise ValueError("it belongs to something else")
        return StepTimes(tuple(entry["key"]["rows"]), tuple(map(float, entry["seconds"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        _log.warning("step times in %s cannot be used, measuring again: %s: %s", path, type(error).__name__, error)
        return None


def _keep(key: dict[str, object], times: StepTimes) -> None:
    """Writes the times to disk; if the folder cannot be written, only logs that."""
    path, temporary = _path(key), ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump({"key": key, "seconds": times.seconds}, file)
        Path(temporary).replace(path)
    except OSError as error:
        _log.info("step times are not kept: %s", error)
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _path(key: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "step_times" / f"{digest[:24]}.json"


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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _key(fingerprint: str, rows: Sequence[int], device: torch.device) -> dict[str, object]:
    try:
        package_version = version("pass_ext")
    except PackageNotFoundError:
        package_version = "0+unknown"
    return {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "rows": list(rows),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "pass_ext": package_version,
        "kernels": kernels_hash(device.type),
        "instructions": status().cpu_isa,
    }


def device_name(device: torch.device) -> str:
    """The model of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, "") or platform.processor() or platform.machine()

"""How long one model call takes at each number of rows, measured on this machine and kept on disk.

    t(rows): piecewise linear through the medians, never falling, the last slope continued

Called by the PaSS method with ``rows="auto"``, for the planner.
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

from pass_ext.cache_folder import cache_folder

_log = logging.getLogger("pass_ext")
_FORMAT = 1
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 15


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one call at some numbers of rows.

    A number of rows that took longer than a larger one is given the larger one's time: what disturbs a measurement adds to it.

    Args:
        rows: ascending, two or more.
        seconds: one for each.
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
        """Seconds of one call at this number of rows; below the fewest measured, what those took."""
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
    refresh: bool = False,
) -> StepTimes:
    """Times ``run(rows)`` at each number of rows: medians of rounds that visit all of them, every other one backwards.

    Args:
        run: makes one call with so many rows, on ``device``.
        rows: ascending, two or more.
        fingerprint: what ``run`` runs: model, sizes, dtype, attention, graphs. With it the result is kept on disk and found
            there again, for this device, number of threads and versions of torch and pass_ext. None: never kept; nor
            are times of a CPU that was busy with something else.
        device: waited for before and after each call where it is CUDA.
        budget: seconds to spend, warm-up included; 3 rounds are made in any case.
        refresh: measure even if the result is on disk.
    """
    key = None if fingerprint is None else _key(fingerprint, rows, torch.device(device))
    if key is not None and not refresh and (kept := _read(key)) is not None:
        return kept
    busy = _others_compute(torch.device(device))
    times = _measure(run, tuple(rows), torch.device(device), budget)
    if key is not None and busy:
        _log.info("step times are not kept: other programs were computing while they were measured")
    elif key is not None:
        _write(key, times)
    return times


def _others_compute(device: torch.device) -> bool:
    """Whether the CPU had most of its cores in use in the last minute: times would be of that, not of the model."""
    return device.type == "cpu" and os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1)


def _measure(run: Callable[[int], object], rows: tuple[int, ...], device: torch.device, budget: float) -> StepTimes:
    def timed(count: int) -> float:
        _wait(device)
        begin = time.perf_counter()
        run(count)
        _wait(device)
        return time.perf_counter() - begin

    begin = time.perf_counter()
    for count in rows:  # first calls allocate, compile and warm caches
        timed(count)
    seen: dict[int, list[float]] = {count: [] for count in rows}
    for done in range(_MOST_ROUNDS):
        spent = time.perf_counter() - begin
        if done >= _FEWEST_ROUNDS and spent * (done + 2) / (done + 1) > budget:
            break
        for count in rows if done % 2 == 0 else reversed(rows):
            seen[count].append(timed(count))
    return StepTimes(rows, tuple(sorted(seen[count])[len(seen[count]) // 2] for count in rows))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _key(fingerprint: str, rows: Sequence[int], device: torch.device) -> dict[str, object]:
    try:
        own = version("pass_ext")
    except PackageNotFoundError:
        own = "0+unknown"
    return {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "rows": list(rows),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "pass_ext": own,
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


def _path(key: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "step_times" / f"{digest[:24]}.json"


def _read(key: dict[str, object]) -> StepTimes | None:
    path = _path(key)
    try:
        entry = json.loads(path.read_text())
        if entry["key"] != key:
            raise ValueError("it belongs to something else")
        times = StepTimes(tuple(entry["key"]["rows"]), tuple(entry["seconds"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("step times in %s cannot be used, measuring again: %s", path, error)
        return None
    _log.debug("step times from %s: %s", path, times)
    return times


def _write(key: dict[str, object], times: StepTimes) -> None:
    path = _path(key)
    temporary = ""
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

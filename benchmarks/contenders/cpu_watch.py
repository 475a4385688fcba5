"""``CpuWatch``: measures how much other programs compute while this process times itself.

others = (CPU time spent on this process's cores - CPU time of this process) / (wall time · cores)
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SHORTEST = 0.1  # seconds: /proc/stat counts hundredths


class CpuUse(NamedTuple):
    """Use of the CPU during one stretch of time."""

    others: float | None
    """Other programs' share of the cores; None: unknown."""


class CpuWatch:
    """Measures the use of the CPU from construction to ``stop``.

    Args:
        cores: which are watched; None: those of this process.
    """

    def __init__(self, cores: frozenset[int] | None = None) -> None:
        self._cores = _own_cores() if cores is None else cores
        self._begin = self._read()

    @property
    def cores(self) -> int:
        """The number of cores that are watched."""
        return len(self._cores)

    def stop(self) -> CpuUse:
        """The use since construction. Sleeps if the time is too short for /proc/stat."""
        wall = time.perf_counter() - self._begin[0]
        if self._begin[2] is not None and wall < _SHORTEST:
            time.sleep(_SHORTEST - wall)
        end = self._read()
        whole, others = end[0] - self._begin[0], None
        if self._begin[2] is not None and end[2] is not None and whole > 0:
            slack = 0.01 * len(self._cores)  # seconds: each core's count is rounded
            spent = end[2] - self._begin[2] - (end[1] - self._begin[1]) - slack
            others = max(0.0, spent) / (whole * len(self._cores))
        return CpuUse(others)

    def _read(self) -> tuple[float, float, float | None]:
        """Seconds of the wall clock, of this process, and of all programs on its cores."""
        return time.perf_counter(), time.process_time(), _spent(_proc_stat(), self._cores)


def _own_cores() -> frozenset[int]:
    """The cores of all threads: where OpenMP binds threads, the calling one has a core of its own."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    cores = set(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has just ended
            cores |= os.sched_getaffinity(int(thread.name))
    return frozenset(cores)


def _proc_stat() -> str:
    try:
        return Path("/proc/stat").read_text()
    except OSError:
        return ""


def _spent(stat: str, cores: frozenset[int]) -> float | None:
    """Seconds that these cores were busy, from the text of /proc/stat; None if it does not list them all."""
    busy = {}
    for name, *columns in map(str.split, stat.splitlines()):
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            # user nice system idle iowait irq softirq steal; the guests after them are part of user and nice
            ticks = [int(column) for column in columns[:8]]
            busy[name] = sum(ticks) - sum(ticks[3:5])
    if len(busy) < len(cores) or not any(busy.values()):
        return None
    return sum(busy.values()) / os.sysconf("SC_CLK_TCK")

"""``KeptTimes``: measured step times on disk, with the time of measuring and the use of the CPU then.

    fresh       for a day after they were measured or confirmed
    to confirm  for 30 days after they were measured
    too old     afterwards: drivers, firmware and the kernel change, and the key does not show it

Incomplete entries, and those from a busy machine, count as damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pass_ext.checkpoint import cache_folder
from pass_ext.decoding.planning.cpu_watch import CpuUse

FORMAT = 2
_DAY = 24 * 3600.0
_FRESH, _OLDEST = _DAY, 30 * _DAY
_log = logging.getLogger("pass_ext")


@dataclass(frozen=True)
class KeptTimes:
    """Seconds at each number of rows of the key, and how they were measured."""

    key: dict[str, object]
    seconds: tuple[float, ...]
    use: CpuUse
    spread: float
    """(median - fastest) / fastest of the rounds, the mean over all numbers of rows."""
    measured: float
    """When they were measured, in seconds since 1970."""
    confirmed: float
    """When a call last took as long as here, in seconds since 1970."""

    @property
    def path(self) -> Path:
        """The path of their file."""
        return _path(self.key)

    @property
    def is_fresh(self) -> bool:
        """True if they were confirmed within a day: nothing has to be timed."""
        return 0 <= time.time() - self.confirmed <= _FRESH

    def confirm(self) -> None:
        """Writes that a call takes as long today as it does here."""
        replace(self, confirmed=time.time()).write()

    @classmethod
    def read(cls, key: dict[str, object], device: torch.device, most_spread: float) -> KeptTimes | None:
        """Reads the times of this key; None if there are none, and, with a line in the log, if they are too old, damaged, or
        from a busy machine."""
        path = _path(key)
        try:
            entry = json.loads(path.read_text())
            if entry["key"] != key:
                raise ValueError("it belongs to something else")
            use = CpuUse(
                None if entry["others"] is None else float(entry["others"]),
                float(entry["waited"]),
                float(entry["load"]),
            )
            times = cls(
                key,
                tuple(map(float, entry["seconds"])),
                use,
                float(entry["spread"]),
                float(entry["measured"]),
                float(entry["confirmed"]),
            )
            if disturbance := use.disturbance(device):
                raise ValueError(disturbance)
            if not times.spread <= most_spread:
                raise ValueError(f"its rounds differ by {times.spread:.0%}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            _log.warning("step times in %s cannot be used, measuring again: %s: %s", path, type(error).__name__, error)
            return None
        if not -_DAY <= time.time() - times.measured <= _OLDEST:
            _log.info("step times in %s are more than 30 days old, or of the future: measuring again", path)
            return None
        return times

    def write(self) -> None:
        """Writes them to disk; if the folder cannot be written, only logs that."""
        path = self.path
        entry = {"key": self.key, "seconds": self.seconds, "spread": self.spread, **self.use._asdict()}
        entry |= {"measured": self.measured, "confirmed": self.confirmed}
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                json.dump(entry, file)
            Path(temporary).replace(path)
        except OSError as error:
            _log.info("step times are not kept: %s", error)
            if temporary:
                Path(temporary).unlink(missing_ok=True)


def _path(key: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "step_times" / f"{digest[:24]}.json"

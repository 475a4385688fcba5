"""``KeptTimes``: measured step times on disk, with when they were measured and what else the machine did then.

    fresh       for a day after they were measured or confirmed
    to confirm  for 30 days after they were measured
    too old     then: drivers, firmware and the kernel change, and nothing in the key shows it

An entry that does not say all of it, and one of a busy machine, counts as damaged.
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

from pass_ext.cache_folder import cache_folder
from pass_ext.decoding.planning.cpu_watch import CpuUse

FORMAT = 2
_DAY = 24 * 3600.0
_FRESH, _OLDEST = _DAY, 30 * _DAY
_log = logging.getLogger("pass_ext")


@dataclass(frozen=True)
class KeptTimes:
    """Seconds at each number of rows of the key, and how they came about."""

    key: dict[str, object]
    seconds: tuple[float, ...]
    use: CpuUse
    spread: float
    """By how much the median of a number's rounds exceeds the fastest, in parts of the fastest, the mean of all numbers."""
    measured: float
    """Seconds since 1970."""
    confirmed: float
    """When they last were as long as here."""

    @property
    def path(self) -> Path:
        """Of the file."""
        return _path(self.key)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing need be timed."""
        return 0 <= time.time() - self.confirmed <= _FRESH

    def confirm(self) -> None:
        """Notes that a call took as long as it does here, today."""
        replace(self, confirmed=time.time()).write()

    @classmethod
    def read(cls, key: dict[str, object], device: torch.device, most_spread: float) -> KeptTimes | None:
        """Those of this key; None, with a line in the log, if they are too old, damaged, or of a busy machine."""
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
            kept = cls(
                key,
                tuple(map(float, entry["seconds"])),
                use,
                float(entry["spread"]),
                float(entry["measured"]),
                float(entry["confirmed"]),
            )
            if disturbance := use.disturbance(device):
                raise ValueError(disturbance)
            if not kept.spread <= most_spread:
                raise ValueError(f"its rounds differ by {kept.spread:.0%}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            _log.warning("step times in %s cannot be used, measuring again: %s: %s", path, type(error).__name__, error)
            return None
        if not -_DAY <= time.time() - kept.measured <= _OLDEST:
            _log.info("step times in %s are more than 30 days old, or of the future: measuring again", path)
            return None
        return kept

    def write(self) -> None:
        """Keeps them; a folder that cannot be written is no error."""
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

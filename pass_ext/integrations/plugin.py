"""What every engine plugin asks: is it wanted, was it tested with this version, and are there kernels for this device.

    PASS_EXT_<ENGINE> = off | on     off, the default, leaves the engine as it is

An engine imports its plugins in every process, so nothing here raises: a wish that cannot be granted is one warning in the
engine's log, with the reason.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from functools import cache

from pass_ext import _library


def is_wanted(engine: str, log: logging.Logger) -> bool:
    """Whether ``PASS_EXT_<ENGINE>`` is "on". Any other value but "off" is a warning, and off."""
    variable = f"PASS_EXT_{engine.upper()}"
    value = os.environ.get(variable, "off").strip().lower()
    if value not in ("on", "off", ""):
        log.warning("pass_ext: %s must be on or off, got %r; nothing is replaced", variable, value)
    return value == "on"


def untested_version(engine: str, version: str, tested: Sequence[str], numbers: int = 2) -> str:
    """ "" if the version's first ``numbers`` numbers are those of a tested one, else why pass_ext refuses it."""
    first = re.match(r"\d+" + r"\.\d+" * (numbers - 1), version)
    if first is not None and any(re.match(re.escape(first[0]) + r"(\.|$)", known) for known in tested):
        return ""
    return f"pass_ext is tested with {engine} {', '.join(tested)}, and this is {version}"


@cache
def missing_kernels(device: str) -> str:
    """ "" if there are kernels for tensors of this kind ("cpu", "cuda"), else the reason why there are none."""
    if device == "cpu":
        return ""
    reason = _library.status().cuda_reason if device == "cuda" else f"there are none for {device}"
    return reason and f"no kernels of pass_ext: {reason}"

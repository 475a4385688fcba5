"""The tree ops on the emulator."""

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}

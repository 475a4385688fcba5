"""Checks of arguments that a caller writes by hand, in one wording: what must be given, and what came."""

from __future__ import annotations

from typing import Any


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Raises ValueError for anything but an int from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} must be a whole number, {limits}, got {value!r}")


def instance(name: str, value: Any, kinds: type | tuple[type, ...], words: str) -> None:
    """Raises TypeError for a value of another type. words: what must be given."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {words}, got {type_of(value)}")


def type_of(value: Any) -> str:
    """The type of a value, and the way out where a class came in place of its instance."""
    return (
        f"the class {value.__name__}: write {value.__name__}(...)" if isinstance(value, type) else type(value).__name__
    )

"""``rebound``: a copy of a function for which some global names mean other objects. ``globals_of``: what they mean."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any


def globals_of(function: Any) -> dict[str, Any]:
    """The globals of a function, after its decorators."""
    found: dict[str, Any] = inspect.unwrap(function).__globals__
    return found


def rebound(function: FunctionType, names: Mapping[str, Any]) -> FunctionType | None:
    """The copy, inside copies of the function's decorators; None if one of these does not hold in its closure what it
    decorates. Its other globals are the function's of now."""
    inner = getattr(function, "__wrapped__", None)
    cells, known = function.__closure__ or (), function.__globals__
    within: FunctionType | None = None
    if inner is None:
        known = {**known, **names}
    else:
        within = rebound(inner, names)
        moved = tuple(CellType(within) if _is_in(inner, cell) else cell for cell in cells)
        if within is None or moved == cells:
            return None
        cells = moved
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    if within is not None:
        vars(copy)["__wrapped__"] = within  # so that the copy's own globals are found
    return copy


def _is_in(value: Any, cell: CellType) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False

"""``rebound``: a copy of a function for which a global name means another object."""

from __future__ import annotations

import inspect
from functools import cache
from types import CellType, FunctionType
from typing import Any


def rebound(function: FunctionType, names: dict[str, Any]) -> FunctionType | None:
    """The copy, inside the decorators of the function; None if one of these does not hold in its closure what it decorates.

    Equal arguments give one copy, whose other globals are the function's of now: torch.compile keeps its graphs by code object.
    """
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return None
    copy = _copy(inner, tuple(names))
    copy.__globals__.update({**inner.__globals__, **names})
    return _decorated(function, inner, copy)


@cache
def _copy(function: FunctionType, _: tuple[str, ...]) -> FunctionType:
    return _made(function, function.__closure__, code=function.__code__.replace(), globals_={})


@cache
def _decorated(outer: Any, inner: FunctionType, copy: FunctionType) -> FunctionType | None:
    if outer is inner:
        return copy
    wrapped, cells = outer.__wrapped__, outer.__closure__ or ()
    within = _decorated(wrapped, inner, copy)
    if within is None or not any(cell.cell_contents is wrapped for cell in cells):
        return None
    return _made(outer, tuple(CellType(within) if cell.cell_contents is wrapped else cell for cell in cells))


def _made(function: FunctionType, closure: Any, code: Any = None, globals_: Any = None) -> FunctionType:
    names = function.__globals__ if globals_ is None else globals_
    made = FunctionType(code or function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made

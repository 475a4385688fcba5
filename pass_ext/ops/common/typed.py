"""``typed``: names the argument of a public op that has a wrong type, by the types of the function's signature.

It looks only after the op has failed, so a good call pays for one more Python frame.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from pass_ext.ops.common.parameters import Parameter

P = ParamSpec("P")
R = TypeVar("R")

_OWN_WORDS = re.compile(r"pass_ext(::|\.distributed\.)\w+: ")
_FAILURES = (AttributeError, IndexError, NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError)


def typed(prefix: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a public op, which messages call ``prefix`` and its own name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*values: P.args, **named: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return function(*values, **named)
            try:
                return function(*values, **named)
            except _FAILURES as error:
                if not _OWN_WORDS.match(str(error)):
                    _refuse(f"{prefix}{function.__name__}", function, values, named)
                raise

        return checked

    return decorate


def _refuse(op: str, function: Callable[..., Any], values: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raises for the first argument that is not of its type; nothing if all are, or if one is missing."""
    try:
        given = inspect.signature(function).bind(*values, **named).arguments
    except TypeError:
        return
    hints = get_type_hints(function)
    for argument, value in given.items():
        hint = hints[argument]
        if hint == Parameter:  # parameters.py checks it
            continue
        kinds = [_kind(each) for each in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
        if not any(fits(value) for _, fits in kinds):
            shown = repr(value)
            raise TypeError(
                f"{op}: {argument} must be {' or '.join(words for words, _ in kinds)}, got "
                f"{shown if len(shown) <= 60 else f'{shown[:60]}…'} of type {type(value).__name__}"
            ) from None
        if isinstance(value, Tensor) and value.dim() == 0:
            raise RuntimeError(f"{op}: {argument} must have dimensions, got a single number of {value.dtype}") from None


def _kind(hint: Any) -> tuple[str, Callable[[Any], bool]]:
    """A type in words, and what a value of it fulfils."""
    if get_origin(hint) in (Sequence, Mapping):
        inner = [_kind(each)[1] for each in get_args(hint)]
        if get_origin(hint) is Mapping:
            return "a dictionary", lambda value: isinstance(value, Mapping)
        return "a list", lambda value: isinstance(value, (list, tuple)) and all(inner[0](item) for item in value)
    if hint is int:
        return "an integer of 64 bits", lambda value: type(value) is int and -(2**63) <= value < 2**63
    if hint is float:
        return "a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is type(None):
        return "None", lambda value: value is None
    if get_origin(hint) is tuple:
        return "a pair", lambda value: isinstance(value, tuple) and len(value) == len(get_args(hint))
    names = {Tensor: "a tensor", bool: "True or False", str: "a string", torch.dtype: "a dtype"}
    return names.get(hint, getattr(hint, "__name__", str(hint))), lambda value: isinstance(value, hint)

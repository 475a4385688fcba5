"""``difference_of``: compares a model's own function with what pass_ext computes in its place, once in a process."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch

MACHINE = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that say nothing about the model."""
_outcomes: WeakKeyDictionary[Callable[..., Any], dict[Hashable, bool]] = WeakKeyDictionary()
"""Of the comparisons that came to an end, by function and form."""


def difference_of(theirs: Callable[..., Any], form: Hashable, compare: Callable[[], bool]) -> str | None:
    """How a function differs from ours, to follow its name; None: it does not. form: all that the outcome may depend on."""
    known = _outcomes.setdefault(theirs, {})
    if form not in known:
        try:
            known[form] = compare()
        except MACHINE:
            raise
        except (TypeError, RuntimeError, ValueError, AttributeError, LookupError) as error:
            return f"cannot be compared ({type(error).__name__}: {error})"
    return None if known[form] else "computes something else"

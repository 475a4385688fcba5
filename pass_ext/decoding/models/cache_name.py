"""``cache_name``: what a transformers model calls its cache, ``cache`` since 5.24, ``past_key_values`` before.

The old name still works in 5.24, with a warning; models of other packages may keep it for long.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_NAMES = ("cache", "past_key_values")


def cache_name(takes: Callable[..., Any]) -> str:
    """The argument by which a model's forward, a layer's, or the class of an output takes the cache."""
    return next((name for name in _NAMES if name in inspect.signature(takes).parameters), _NAMES[1])


def given_cache(named: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, by either name; None: there is none."""
    return next((named[name] for name in _NAMES if named.get(name) is not None), None)

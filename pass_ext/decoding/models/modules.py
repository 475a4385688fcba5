"""``modules_of``: a model and all that is inside it, in the order of ``modules()``, whose names take three times as long.

A generation looks a few dozen times for modules that it must know, through hundreds of them.
"""

from __future__ import annotations

from typing import Any


def modules_of(model: Any) -> list[Any]:
    """Each module once, before those inside it."""
    found: dict[Any, None] = {}
    going = [model]
    while going:
        module = going.pop()
        if module is None or module in found:
            continue
        found[module] = None
        if inside := module._modules:
            going += reversed(list(inside.values()))
    return list(found)

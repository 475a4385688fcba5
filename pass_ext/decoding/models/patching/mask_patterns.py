"""Finds the pattern behind a mask function of transformers: causal, or causal with a sliding window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """The window of a mask: -1 if a row sees itself and all rows before it, w if it sees the last w of these; None for any
    other pattern.

    transformers does not store the pattern, so the function is compared with the functions that ``masking_utils`` makes.
    """
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return -1
    parts = _captured(mask_function, masking_utils.and_masks, "mask_functions")
    if isinstance(parts, tuple) and len(parts) == 2 and parts[1] is masking_utils.causal_mask_function:
        window = _captured(parts[0], masking_utils.sliding_window_overlay, "sliding_window")
        if isinstance(window, int):
            return window
    return None


def _captured(function: Any, maker: Callable[..., Any], name: str) -> Any:
    """The closure variable of a function that ``maker`` returned; None for any other function."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or closure is None or code not in maker.__code__.co_consts or name not in code.co_freevars:
        return None
    return closure[code.co_freevars.index(name)].cell_contents

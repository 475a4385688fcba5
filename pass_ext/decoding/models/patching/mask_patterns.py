"""Finds the pattern behind a mask function of transformers (causal, or causal with a sliding window), and compares windows."""

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


def window_conflict(module: Any, sliding_window: int | None, window: int) -> str | None:
    """The reason why a layer's ``sliding_window`` contradicts the window of its mask; None if both agree or
    the layer passes no window. "eager" and "sdpa" obey the mask, so a layer that says otherwise is refused."""
    if sliding_window is None or sliding_window == window:
        return None
    return f"{type(module).__name__} says sliding_window={sliding_window}, its mask has {window_text(window)}"


def window_text(window: int) -> str:
    """The window in words, for messages."""
    return f"a window of {window}" if window >= 0 else "no window"

"""``dropped_arguments``: what a caller gave ``model.generate`` and transformers does not pass on to a callable.

It prepares the arguments of its own loops and then calls ``custom_generate`` without ``streamer``, ``assistant_model``,
``synced_gpus`` and negative prompts. They are in the frame of its ``generate``.
"""

from __future__ import annotations

import inspect
from typing import Any

_DROPPED = (
    "streamer",
    "assistant_model",
    "synced_gpus",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)


def dropped_arguments() -> dict[str, Any]:
    """Those arguments of the innermost ``model.generate`` on the stack, None for what was not given; {}: there is none."""
    from transformers import GenerationMixin

    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    return {} if frame is None else {name: frame.f_locals[name] for name in _DROPPED}


class Continued:
    """A streamer that has the prompt already, from transformers: the first ``put`` is left out."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._has_prompt = streamer, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)

    def put(self, tokens: Any) -> None:
        """Passes new tokens on."""
        if self._has_prompt:
            self._streamer.put(tokens)
        self._has_prompt = True

"""``Listener``: who hears of new tokens, a streamer, and who may end a text after any of them, stopping criteria."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Listener:
    """Both in transformers' form. A streamer with ``put_step(tokens, accepted)`` is told of whole steps instead."""

    def __init__(self, streamer: Any, stopping: Callable[[Tensor, Any], Any] | None) -> None:
        self._streamer, self._stopping = streamer, stopping

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        """The prompts."""
        if self._streamer is None:
            return
        if len(texts) != 1:
            raise ValueError(f"a streamer takes one request, got {len(texts)}")
        self._streamer.put(torch.tensor(texts))

    def heard(self, request: int, text: list[int], new: list[int], accepted: int) -> tuple[int, bool]:
        """``new`` follows ``text``, its first ``accepted`` tokens were drafted -> how many of them to keep, whether to stop."""
        kept, stopped = (len(new), False) if self._stopping is None else self._until_stop(request, text, new)
        if self._streamer is not None:
            if hasattr(self._streamer, "put_step"):
                self._streamer.put_step(new[:kept], min(accepted, kept))
            else:
                for token in new[:kept]:
                    self._streamer.put(torch.tensor([token]))
        return kept, stopped

    def _until_stop(self, request: int, text: list[int], new: list[int]) -> tuple[int, bool]:
        assert self._stopping is not None
        stops = getattr(self._stopping, "stops", None)  # of criteria that want to know whose text it is
        for count in range(1, len(new) + 1):
            so_far = text + new[:count]
            stop = stops(request, so_far) if stops else self._stopping(torch.tensor([so_far]), None)
            if bool(stop.all()) if isinstance(stop, Tensor) else bool(stop):
                return count, True
        return len(new), False

    def end(self) -> None:
        """No more tokens come."""
        if self._streamer is not None:
            self._streamer.end()

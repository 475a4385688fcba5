"""``Listener``: feeds new tokens to the streamer and asks the stopping criteria."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.arguments import type_of


class Listener:
    """A streamer and stopping criteria in transformers' form. A streamer with ``put_step(tokens, accepted)`` gets whole
    steps instead of single tokens."""

    def __init__(self, streamer: Any, stopping: Callable[[Tensor, Any], Any] | None) -> None:
        for name in ("put", "end"):
            if streamer is not None and (isinstance(streamer, type) or not callable(getattr(streamer, name, None))):
                raise TypeError(f"generate: streamer must have put(tokens) and end(), got {type_of(streamer)}")
        if stopping is not None and (isinstance(stopping, type) or not callable(stopping)):
            raise TypeError(f"generate: stopping must be called with (ids, None), got {type_of(stopping)}")
        self._streamer, self._stopping = streamer, stopping

    @property
    def is_silent(self) -> bool:
        """True: nobody listens, so no code of the caller's runs."""
        return self._streamer is None and self._stopping is None

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        """Gives the prompt to the streamer."""
        if self._streamer is None:
            return
        if len(texts) != 1:
            raise ValueError(f"a streamer takes one request, got {len(texts)}")
        self._streamer.put(torch.tensor(texts))

    def feed(self, request: int, text: list[int], new: list[int], accepted: int) -> tuple[int, bool]:
        """Takes the tokens ``new`` behind ``text``, the first ``accepted`` of which were drafted.

        Returns:
            How many of them stay in the text; and whether the text ends there.
        """
        count, stopped = (len(new), False) if self._stopping is None else self._until_stop(request, text, new)
        if self._streamer is not None:
            if hasattr(self._streamer, "put_step"):
                self._streamer.put_step(new[:count], min(accepted, count))
            else:
                for token in new[:count]:
                    self._streamer.put(torch.tensor([token]))
        return count, stopped

    def _until_stop(self, request: int, text: list[int], new: list[int]) -> tuple[int, bool]:
        assert self._stopping is not None
        stops = getattr(self._stopping, "stops", None)  # criteria that depend on the request have this method
        for count in range(1, len(new) + 1):
            so_far = text + new[:count]
            stop = stops(request, so_far) if stops else self._stopping(torch.tensor([so_far]), None)
            if bool(stop.all()) if isinstance(stop, Tensor) else bool(stop):
                return count, True
        return len(new), False

    def end(self) -> None:
        """Ends the stream."""
        if self._streamer is not None:
            self._streamer.end()

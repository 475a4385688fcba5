"""``Texts``: the texts of a batch on the host, which it extends by the tokens of each step and ends.

``Listener``: the streamer and the stopping criteria. ``Reports``: a device's reports on their way to the host, which reads them
later without a wait for newer work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.arguments import type_of
from pass_ext.decoding.requests.guides import Guides
from pass_ext.decoding.stats import AcceptanceCounts
from pass_ext.ops.accept import STATUS


class Report(NamedTuple):
    """The result of a step for one request."""

    accepted: int
    """How many drafted tokens were accepted; -1: the request was at its end."""
    status: int
    """The accept result's."""
    drafted: int
    """How many drafted tokens the step verified."""
    emitted: Sequence[int]
    """As ``accept_tree`` returns them; the tokens after ``accepted + 1`` are ignored."""


class Texts:
    """The texts of a batch.

    Args:
        tokens: of each request, the prompt first. The lists grow.
        max_new_tokens: the most new tokens of each text.
        ends: tokens that end a text.
        max_accepted: the most tokens that one step can accept.
        guides: the grammars of the texts; None: none has one.
    """

    def __init__(
        self,
        tokens: Sequence[list[int]],
        max_new_tokens: int,
        ends: frozenset[int],
        listener: Listener,
        max_accepted: int,
        guides: Guides | None = None,
    ) -> None:
        self.tokens = tokens
        self.limits = [len(text) + max_new_tokens for text in tokens]
        self.remaining = [max_new_tokens] * len(tokens)
        """Tokens that each request still has to write; 0: it has ended."""
        self.counts = AcceptanceCounts(max(1, max_accepted))
        self._ends, self._listener, self._guides = ends, listener, guides

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def are_silent(self) -> bool:
        """True: extending them runs no code of the caller's."""
        return self._listener.is_silent and self._guides is None

    @property
    def longest(self) -> int:
        """The length that the longest text may reach."""
        return max(self.limits)

    def extend(self, request: int, report: Report) -> int:
        """Adds a step's tokens to a text, up to its end -> how many tokens the text has gained."""
        accepted, status, drafted, emitted = report
        text, new = self.tokens[request], list(emitted[: accepted + 1])
        if status or not new or -1 in new:
            reasons = " and ".join(words for bit, words in STATUS.items() if status & bit)
            raise RuntimeError(f"request {request}: {reasons or 'no token'} after {len(text)} tokens of text")
        new = new[: self.limits[request] - len(text)]
        end = next((i for i, token in enumerate(new) if token in self._ends), None)
        new = new if end is None else new[: end + 1]
        guide = None if self._guides is None else self._guides.of(request)
        allowed, finished = (len(new), False) if guide is None else guide.advance(new)
        new = new[:allowed]
        count, stopped = self._listener.feed(request, text, new, accepted)
        text += new[:count]
        has_ended = end is not None or stopped or finished
        self.remaining[request] = 0 if has_ended else self.limits[request] - len(text)
        self.counts.add(min(accepted, count), drafted)
        return count


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
        """Takes the tokens ``new`` after ``text``, the first ``accepted`` of which were drafted.

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


class Reports:
    """Reports in the order of their steps. On CUDA a report is copied to pinned memory after the work that wrote it, and an
    event marks that it has arrived. On the CPU, with one at a time, there is no copy: it is read before the next step writes.

    Args:
        report: the buffer that each step overwrites.
        most: how many may be on their way at once.
    """

    def __init__(self, report: Tensor, most: int) -> None:
        self._report = report
        self._free = [report]
        if report.is_cuda or most > 1:
            self._free = [torch.empty(report.shape, dtype=report.dtype, pin_memory=report.is_cuda) for _ in range(most)]
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        """Reports that are sent and not read."""
        return len(self._sent)

    def send(self) -> None:
        """Sends the report as the work launched so far will leave it."""
        buffer = self._free.pop()
        if buffer is not self._report:
            buffer.copy_(self._report, non_blocking=True)
        event = torch.cuda.current_stream(self._report.device).record_event() if self._report.is_cuda else None
        self._sent.append((buffer, event))

    def read(self) -> list[list[int]]:
        """Waits for the oldest report and returns it."""
        buffer, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        numbers: list[list[int]] = buffer.tolist()
        self._free.append(buffer)
        return numbers

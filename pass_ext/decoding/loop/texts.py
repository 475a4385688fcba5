"""``Texts``: the texts of a batch on the host. It extends them by the tokens of each step, ends them, feeds streamer and
stopping criteria, and counts what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pass_ext.decoding.requests.grammar.guides import Guides
from pass_ext.decoding.requests.listener import Listener
from pass_ext.decoding.stats import AcceptanceCounts
from pass_ext.ops.accept import STATUS


class Report(NamedTuple):
    """What a step gave one request."""

    accepted: int
    """How many drafted tokens were accepted; -1: the request was at its end."""
    status: int
    """The accept result's."""
    drafted: int
    """How many drafted tokens the step verified."""
    emitted: Sequence[int]
    """As ``accept_tree`` returns them; the tokens behind ``accepted + 1`` are ignored."""


class Texts:
    """The texts of a batch.

    Args:
        tokens: of each request, the prompt first. The lists grow.
        max_new_tokens: the most new tokens of each text.
        ends: tokens that end a text.
        listener: streamer and stopping criteria.
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
        self.remaining = [max_new_tokens for _ in tokens]
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
            raise RuntimeError(f"request {request}: {reasons or 'no token'} behind {len(text)} tokens of text")
        new = new[: self.limits[request] - len(text)]
        end = next((i for i, token in enumerate(new) if token in self._ends), None)
        new = new if end is None else new[: end + 1]
        guide = None if self._guides is None else self._guides.of(request)
        allowed, finished = (len(new), False) if guide is None else guide.advance(new)
        new = new[:allowed]
        count, stopped = self._listener.feed(request, text, new, accepted)
        text += new[:count]
        self.remaining[request] = (
            self.limits[request] - len(text) if end is None and not stopped and not finished else 0
        )
        self.counts.add(min(accepted, count), drafted)
        return count

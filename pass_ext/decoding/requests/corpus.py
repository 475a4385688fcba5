"""``Corpus``: texts whose continuations are candidates for other texts: samples of one prompt, earlier answers, documents.

    a text ends in tokens that some text of the corpus has before place e: its tokens from e on are a candidate,
    the candidates after longer matches first, then the latest

Memory: at most ``most_tokens`` tokens; the texts that were opened first are dropped whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import index
from threading import Lock

from pass_ext.decoding.arguments import whole_number

_MOST_PLACES = 64
"""Places that are kept of the same few tokens, the latest: frequent tokens would have thousands that continue alike."""
_LONGEST_MATCH = 32
"""Tokens that are compared before a place; two longer matches count as equal."""


class CorpusText:
    """One text of a corpus, which may grow. ``Corpus.open`` makes it."""

    def __init__(self, corpus: Corpus) -> None:
        self.tokens: list[int] = []
        self.is_dropped = False
        self._corpus = corpus

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens at the end; nothing where the corpus has dropped the text."""
        try:
            numbers = [index(token) for token in tokens]
        except TypeError:
            raise TypeError(f"Corpus: tokens must be whole numbers, got {tokens!r}") from None
        self._corpus._extend(self, numbers)


class Corpus:
    """Texts whose continuations are candidates: ``NGram(corpus=...)``. Threads may share one.

    ``generate`` adds every text that it writes, prompt and new tokens, step by step, or at its end where drafting pauses. So
    the samples of a batch see each other, and later calls see them all. Candidates leave texts as they are.

    Args:
        most_tokens: of all texts together; beyond it, whole texts are dropped, the oldest first.
        shortest: how many tokens must match at least.
    """

    def __init__(self, most_tokens: int = 1_000_000, *, shortest: int = 3) -> None:
        whole_number("Corpus: most_tokens", most_tokens)
        whole_number("Corpus: shortest", shortest)
        self.most_tokens = most_tokens
        self.shortest = shortest
        self._texts: deque[CorpusText] = deque()
        self._tokens = 0
        self._places: dict[tuple[int, ...], deque[tuple[CorpusText, int]]] = {}  # text and the place after the tokens
        self._lock = Lock()

    def __len__(self) -> int:
        """The number of tokens."""
        return self._tokens

    def add(self, tokens: Iterable[int]) -> None:
        """Adds a whole text."""
        self.open().extend(tokens)

    def open(self) -> CorpusText:
        """A new text, still empty."""
        text = CorpusText(self)
        with self._lock:
            self._texts.append(text)
        return text

    def continuations(
        self,
        text: Sequence[int],
        tokens: int,
        count: int,
        *,
        without: CorpusText | None = None,
        allowed: Callable[[Sequence[int]], int] | None = None,
    ) -> list[tuple[int, list[int]]]:
        """Up to ``count`` different continuations of a text, up to ``tokens`` tokens each, with the number of matching tokens.

        Args:
            text: its last tokens are looked up.
            without: a text whose own continuations are left out.
            allowed: how many tokens of a continuation a grammar allows; it is cut there. None: all.
        """
        if len(text) < self.shortest or tokens < 1:
            return []
        with self._lock:
            places = list(self._places.get(tuple(text[-self.shortest :]), ()))
        matches = [
            (_matching(text, other.tokens, end), other.tokens[end : end + tokens])
            for other, end in reversed(places)
            if other is not without and not other.is_dropped
        ]
        found: dict[tuple[int, ...], int] = {}
        for length, chain in sorted(matches, key=lambda match: -match[0]):  # stable: the latest first among equals
            if len(found) >= count:
                break
            if chain and allowed is not None:
                chain = chain[: allowed(chain)]
            if chain:
                found.setdefault(tuple(chain), length)
        return [(length, list(chain)) for chain, length in found.items()]

    def _extend(self, text: CorpusText, tokens: list[int]) -> None:
        with self._lock:
            if text.is_dropped:
                return
            for token in tokens:
                text.tokens.append(token)
                if len(text) >= self.shortest:
                    key = tuple(text.tokens[-self.shortest :])
                    self._places.setdefault(key, deque(maxlen=_MOST_PLACES)).append((text, len(text)))
            self._tokens += len(tokens)
            while self._tokens > self.most_tokens:
                self._drop(self._texts.popleft())

    def _drop(self, text: CorpusText) -> None:
        text.is_dropped = True
        self._tokens -= len(text)
        for end in range(self.shortest, len(text) + 1):
            key = tuple(text.tokens[end - self.shortest : end])
            left = [place for place in self._places.get(key, ()) if not place[0].is_dropped]
            if left:
                self._places[key] = deque(left, maxlen=_MOST_PLACES)
            else:
                self._places.pop(key, None)


def _matching(text: Sequence[int], other: Sequence[int], end: int) -> int:
    """How many of a text's last tokens are another one's tokens before a place."""
    most, count = min(len(text), end, _LONGEST_MATCH), 0
    while count < most and text[-1 - count] == other[end - 1 - count]:
        count += 1
    return count

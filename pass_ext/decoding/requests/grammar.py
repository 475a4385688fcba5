"""``Grammar``: the interface of a grammar that a text follows. ``allow_tokens``: writes a mask from a list of tokens.

    accept(token)     moves on by a token, or says that it is forbidden
    rollback(count)   moves back
    fill_mask(words)  the tokens that may follow, as bits
    may_end           whether the text may end here
    forced()          tokens that probably follow, for jump-forward drafts
    fork()            a copy with a place of its own

docs/guide/grammar.md has an example; ``pass_ext.integrations.grammar`` has xgrammar's and llguidance's grammars. ``Guide``: a
grammar at the end of one text.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_INT32_SIGN = 1 << 31


class Grammar(Protocol):
    """A grammar at a place in a text, after the tokens that it has accepted. A class that inherits from it defines ``accept``,
    ``rollback``, ``fill_mask`` and ``may_end``; the rest has a default.

    ``generate`` forks it once for every text, and moves only the forks. The allowed tokens must depend on the accepted tokens
    alone, not on moves back and forth.
    """

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Moves past this token. False: the grammar forbids it here, and nothing has changed. It is never an end token."""
        ...

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Moves back by the last ``count`` accepted tokens."""
        ...

    @abstractmethod
    def fill_mask(self, words: Tensor) -> None:
        """Overwrites ``words``, ``[ceil(V / 32)]`` int32 on the CPU: bit ``v % 32`` of word ``v // 32`` is 1 if token v may
        follow. Bits of end tokens are ignored: ``may_end`` decides about them."""
        ...

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """True: the text is complete, and may end here."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that probably follow, because the grammar leaves little choice; drafted and verified like all drafts.
        A token that is the only allowed one is drafted without this."""
        return ()

    def fork(self) -> Grammar:
        """A copy at the same place, which moves on its own."""
        return copy.deepcopy(self)


def allow_tokens(words: Tensor, tokens: Iterable[int]) -> None:
    """Overwrites a mask for ``Grammar.fill_mask``: these tokens are allowed, all others are not.

    Args:
        words: ``[ceil(V / 32)]`` int32.
        tokens: ids from 0 to V - 1.
    """
    if not isinstance(words, Tensor) or words.dtype != torch.int32 or words.dim() != 1:
        came = f"{words.dtype} {list(words.shape)}" if isinstance(words, Tensor) else type(words).__name__
        raise TypeError(f"allow_tokens: words must be one row of int32, as fill_mask gets it, got {came}")
    bits: dict[int, int] = {}
    for token in tokens:
        bits[token // 32] = bits.get(token // 32, 0) | 1 << token % 32
    words.zero_()
    for word, value in bits.items():
        words[word] = value - 2 * (value & _INT32_SIGN)


class _Place:
    """A place after a path of tokens."""

    __slots__ = ("below", "forced", "has_ended", "is_finished", "mask", "only")

    def __init__(self, has_ended: bool = False) -> None:
        self.below: dict[int, _Place | None] = {}
        """The places after tokens that were tried; None: forbidden."""
        self.mask: Tensor | None = None
        self.only: int | None = None
        """The only allowed token, if there is one; known once the mask is filled."""
        self.has_ended = has_ended
        """True: after an end token."""
        self.is_finished = False
        """True: no token may follow, and the text is complete; known once the mask is filled."""
        self.forced: list[int] | None = None


class Guide:
    """A grammar at the end of one text, and its masks after every path of drafted tokens.

    A step's paths share their beginnings, so places form a trie below the text's end. The grammar walks to a path by rolling
    back to the common beginning and accepting the rest; each place's mask is filled once, at first use. When a step's tokens
    have become text, the place after them is the next step's root: masks below it stay.

    Args:
        grammar: is forked; the caller's stays where it is.
        vocabulary: V, the number of the model's tokens.
        ends: tokens that end the text.
    """

    def __init__(self, grammar: Grammar, vocabulary: int, ends: Collection[int]) -> None:
        self._grammar = grammar.fork()
        self._vocabulary, self._ends = vocabulary, [end for end in ends if 0 <= end < vocabulary]
        self._root = _Place()
        self._path: list[int] = []  # where the grammar stands, after the text's end
        self._every = torch.full((-(-vocabulary // 32),), -1, dtype=torch.int32)  # all bits

    def allows(self, path: Sequence[int]) -> bool:
        """True if these tokens may follow the text."""
        return self._place(path) is not None

    def allowed_count(self, chain: Sequence[int]) -> int:
        """How many tokens of this chain may follow the text."""
        return next((count for count in range(len(chain)) if not self.allows(chain[: count + 1])), len(chain))

    def has_ended(self, path: Sequence[int]) -> bool:
        """True if nothing may follow these tokens: an end token is among them, or the grammar is finished after them."""
        place = self._place(path)
        if place is None or place.has_ended:
            return True
        self._filled(place, path)
        return place.is_finished

    def mask(self, path: Sequence[int]) -> Tensor:
        """``[ceil(V / 32)]`` int32 on the CPU: the tokens that may follow the text and these tokens. Not to be written to.

        All tokens where the text has ended: rows after an end are never used, but must not be empty. None of them after a
        forbidden path.
        """
        place = self._place(path)
        if place is not None:
            return self._filled(place, path)
        return self._every if self._has_ended_on(path) else torch.zeros_like(self._every)

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that the grammar forces after this path, end tokens included."""
        chain: list[int] = []
        while len(chain) < most and (new := self._next_forced([*path, *chain])):
            chain += new
        return chain[:most]

    def advance(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Takes new tokens of the text.

        Returns:
            How many of them belong to it; and whether it ends after them because no token may follow.
        """
        for count in range(1, len(tokens) + 1):
            path = tokens[:count]
            place = self._place(path)
            if place is None:
                raise RuntimeError(
                    f"generate: grammar {type(self._grammar).__name__}.accept must take the tokens of its mask, got False for "
                    f"token {path[-1]}, new token {count} of a step"
                )
            if place.has_ended or (not self._ends and self.has_ended(path)):
                return count, not place.has_ended
        self._move(tokens)
        root = self._place(tokens)
        assert root is not None
        self._root, self._path = root, []
        return len(tokens), False

    def _place(self, path: Sequence[int]) -> _Place | None:
        place = self._root
        for depth, token in enumerate(path):
            if token not in place.below:
                place.below[token] = self._tried(place, path[:depth], token)
            if (below := place.below[token]) is None:
                return None
            place = below
        return place

    def _has_ended_on(self, path: Sequence[int]) -> bool:
        """True if the text has ended somewhere on this path, which was tried."""
        place: _Place | None = self._root
        for token in path:
            place = place.below.get(token) if place is not None else None
            if place is not None and (place.has_ended or place.is_finished):
                return True
        return False

    def _tried(self, place: _Place, path: Sequence[int], token: int) -> _Place | None:
        """The place after one more token; None if the mask or the grammar forbids it."""
        if place.has_ended or not 0 <= token < self._vocabulary:
            return None
        mask = self._filled(place, path)
        if place.is_finished or not int(mask[token // 32]) >> token % 32 & 1:
            return None
        if token in self._ends:
            return _Place(has_ended=True)
        self._move(path)
        if not self._grammar.accept(token):
            return None
        self._path = [*path, token]
        return _Place()

    def _filled(self, place: _Place, path: Sequence[int]) -> Tensor:
        """The place's mask."""
        if place.mask is not None:
            return place.mask
        if place.has_ended:
            place.mask = self._every
            return place.mask
        self._move(path)
        words, ends = torch.empty_like(self._every), int(self._grammar.may_end)
        self._grammar.fill_mask(words)
        if self._vocabulary % 32:
            words[-1] &= (1 << self._vocabulary % 32) - 1
        for end in self._ends:
            bit = 1 << end % 32
            word = int(words[end // 32]) & 0xFFFFFFFF & ~bit | ends * bit
            words[end // 32] = word - (word >> 31 << 32)
        used = words.nonzero()
        if len(used) == 0 and ends:  # complete, and no end token that could say so
            place.is_finished, words = True, self._every
        elif len(used) == 1:
            at = int(used)
            word = int(words[at]) & 0xFFFFFFFF
            if word & word - 1 == 0:
                place.only = 32 * at + word.bit_length() - 1
        place.mask = words
        return words

    def _next_forced(self, path: Sequence[int]) -> list[int]:
        """The tokens that follow a path for certain or by the grammar's own guess, as far as its mask allows them."""
        place = self._place(path)
        if place is None or place.has_ended:
            return []
        self._filled(place, path)
        if place.is_finished:
            return []
        if place.only is not None:
            return [place.only]
        if place.forced is None:
            self._move(path)
            place.forced = list(self._grammar.forced())
        return place.forced[: self.allowed_count([*path, *place.forced]) - len(path)]

    def _move(self, path: Sequence[int]) -> None:
        """Moves the grammar past an allowed path."""
        same = next((i for i, (a, b) in enumerate(zip(self._path, path, strict=False)) if a != b), None)
        same = min(len(self._path), len(path)) if same is None else same
        if same < len(self._path):
            self._grammar.rollback(len(self._path) - same)
        for token in path[same:]:
            if not self._grammar.accept(token):
                raise RuntimeError(
                    f"generate: grammar {type(self._grammar).__name__}.accept must take a token again after rollback, got "
                    f"False for token {token}"
                )
        self._path = list(path)

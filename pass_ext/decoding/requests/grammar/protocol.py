"""``Grammar``: the interface of a grammar that a text follows. ``allow_tokens``: writes a mask from a list of tokens.

    accept(token)     moves behind a token, or says that it is forbidden
    rollback(count)   moves back
    fill_mask(words)  the tokens that may follow, as bits
    may_end           whether the text may end here
    forced()          tokens that probably follow, for jump-forward drafts
    fork()            a copy with a place of its own

docs/guide/grammar.md has an example; ``pass_ext.integrations.grammar`` has xgrammar's and llguidance's grammars.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_INT32_SIGN = 1 << 31


class Grammar(Protocol):
    """A grammar at a place in a text, behind the tokens that it has accepted. A class that inherits from it defines ``accept``,
    ``rollback``, ``fill_mask`` and ``may_end``; the rest has a default.

    ``generate`` forks it once for every text, and moves only the forks. The allowed tokens must depend on the accepted tokens
    alone, not on moves back and forth.
    """

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Moves behind this token. False: the grammar forbids it here, and nothing has changed. It is never an end token."""
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
        """Tokens that probably follow, because the grammar leaves little choice; they are drafted, and judged like all drafts.
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

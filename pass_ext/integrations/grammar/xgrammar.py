"""``XGrammar``: a compiled grammar of xgrammar as a ``pass_ext.Grammar``.

xgrammar knows the text that it forces, not its tokens: ``forced`` cuts that text into tokens, by the tokenizer or greedily, the
longest token first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pass_ext.decoding.requests.grammar import Grammar

_LONGEST_FORCED = 256  # characters


class XGrammar(Grammar):
    """A grammar of xgrammar, at a place in a text.

    Args:
        grammar: an ``xgrammar.CompiledGrammar``, whose ``TokenizerInfo`` was made with ``vocab_size=`` the model's vocabulary,
            or an ``xgrammar.GrammarMatcher``, which is forked where it stands.
        encode: text -> token ids without special tokens, for tokens that the grammar forces:
            ``lambda text: tokenizer.encode(text, add_special_tokens=False)``. None: the longest tokens first.
    """

    def __init__(self, grammar: Any, encode: Callable[[str], Sequence[int]] | None = None) -> None:
        import xgrammar

        if isinstance(grammar, xgrammar.CompiledGrammar):
            matcher = xgrammar.GrammarMatcher(grammar)
            info = grammar.tokenizer_info
        elif isinstance(grammar, xgrammar.GrammarMatcher):
            matcher, info = grammar.fork(), None
        else:
            raise TypeError(
                "XGrammar: grammar must be an xgrammar.CompiledGrammar or GrammarMatcher, got "
                f"{type(grammar).__module__}.{type(grammar).__name__}"
            )
        self._set(matcher, encode if encode is not None or info is None else _LongestFirst(info))

    def _set(self, matcher: Any, encode: Callable[[str], Sequence[int]] | None) -> None:
        self._matcher, self._encode = matcher, encode
        self._stops = list(matcher.stop_token_ids)

    def accept(self, token: int) -> bool:
        """As ``Grammar``."""
        return token not in self._stops and bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        """As ``Grammar``."""
        self._matcher.rollback(count)

    def fill_mask(self, words: Tensor) -> None:
        """As ``Grammar``. xgrammar's own stop tokens are not allowed: ``generate`` allows the end tokens of the text."""
        try:
            self._matcher.fill_next_token_bitmask(words[None], 0)
        except RuntimeError as error:
            raise ValueError(
                "XGrammar: grammar must be compiled with TokenizerInfo(vocab_size=) the model's vocabulary, "
                f"{32 * len(words) - 31} to {32 * len(words)} tokens, got: {error}"
            ) from error
        for stop in self._stops:
            bit = 1 << stop % 32
            words[stop // 32] &= ~(bit - (bit >> 31 << 32))

    @property
    def may_end(self) -> bool:
        """As ``Grammar``."""
        return bool(self._matcher.is_completed())

    def forced(self) -> Sequence[int]:
        """As ``Grammar``."""
        text = self._matcher.find_jump_forward_string() if self._encode is not None else ""
        return list(self._encode(text[:_LONGEST_FORCED])) if text and self._encode is not None else ()

    def fork(self) -> XGrammar:
        """As ``Grammar``."""
        other = XGrammar.__new__(XGrammar)
        other._set(self._matcher.fork(), self._encode)
        return other


class _LongestFirst:
    """Cuts text into the longest tokens of a vocabulary, from the left. The vocabulary is read at the first text."""

    def __init__(self, info: Any) -> None:
        self._info = info
        self._tokens: dict[bytes, int] = {}
        self._longest = 0

    def __call__(self, text: str) -> list[int]:
        if not self._tokens:
            special = {*self._info.special_token_ids, *self._info.stop_token_ids}
            pieces = enumerate(self._info.decoded_vocab)
            self._tokens = {piece: token for token, piece in pieces if piece and token not in special}
            self._longest = max(map(len, self._tokens), default=0)
        rest, tokens = text.encode(), []
        while rest:
            longest = min(self._longest, len(rest))
            length = next((n for n in range(longest, 0, -1) if rest[:n] in self._tokens), 0)
            if not length:
                break
            tokens.append(self._tokens[rest[:length]])
            rest = rest[length:]
        return tokens

"""``LLGuidance``: a grammar of llguidance as a ``pass_ext.Grammar``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pass_ext.decoding.requests.grammar import Grammar


class LLGuidance(Grammar):
    """A grammar of llguidance, at a place in a text.

    Args:
        tokenizer: an ``llguidance.LLTokenizer`` with ``n_vocab=`` the model's vocabulary, as ``llguidance.hf.from_tokenizer``
            makes it.
        grammar: as llguidance takes it: ``LLMatcher.grammar_from_json_schema(…)``, ``grammar_from_regex``, Lark, …
    """

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        import llguidance

        if not isinstance(tokenizer, llguidance.LLTokenizer):
            raise TypeError(
                "LLGuidance: tokenizer must be an llguidance.LLTokenizer, as llguidance.hf.from_tokenizer makes it, got "
                f"{type(tokenizer).__module__}.{type(tokenizer).__name__}"
            )
        self._set(llguidance.LLMatcher(tokenizer, grammar, log_level=0), tokenizer)
        self._check()

    def _set(self, matcher: Any, tokenizer: Any) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._stops = list(tokenizer.eos_tokens)

    def _check(self) -> None:
        """Raises where llguidance has stopped at an error; its matcher never leaves that state."""
        if self._matcher.is_error():
            raise ValueError(
                f"LLGuidance: grammar must be one that llguidance can follow, got: {self._matcher.get_error()}"
            )

    def accept(self, token: int) -> bool:
        """As ``Grammar``."""
        if token in self._stops or not 0 <= token < self._tokenizer.vocab_size:
            return False
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return taken

    def rollback(self, count: int) -> None:
        """As ``Grammar``."""
        self._matcher.rollback(count)
        self._check()

    def fill_mask(self, words: Tensor) -> None:
        """As ``Grammar``. llguidance's own stop tokens are not allowed: ``generate`` allows the end tokens of the text."""
        size = self._tokenizer.vocab_size
        if -(-size // 32) != len(words):
            raise ValueError(
                f"LLGuidance: tokenizer must have n_vocab= the model's vocabulary, {32 * len(words) - 31} to {32 * len(words)} "
                f"tokens, got {size}"
            )
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        self._check()
        for stop in self._stops:
            bit = 1 << stop % 32
            words[stop // 32] &= ~(bit - (bit >> 31 << 32))

    @property
    def may_end(self) -> bool:
        """As ``Grammar``."""
        return bool(self._matcher.is_accepting())

    def forced(self) -> Sequence[int]:
        """As ``Grammar``."""
        return list(self._matcher.compute_ff_tokens())

    def fork(self) -> LLGuidance:
        """As ``Grammar``."""
        other = LLGuidance.__new__(LLGuidance)
        other._set(self._matcher.deep_copy(), self._tokenizer)
        return other

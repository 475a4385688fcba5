"""Grammars of other libraries for ``pass_ext.generate(grammar=…)``: ``XGrammar`` and ``LLGuidance``.

``allow_tokens`` writes the mask of a grammar of one's own (``pass_ext.Grammar``).
``grammars_of`` makes them from the logits processors in which libraries pack a grammar for transformers:

    xgrammar.contrib.hf.LogitsProcessor                    its compiled grammars, one or one for each text
    outlines.backends.xgrammar.XGrammarLogitsProcessor     its compiled grammar
    outlines.backends.llguidance.LLGuidanceLogitsProcessor its grammar and tokenizer

These follow one text, call by call, so they cannot run on a tree's candidates themselves. Their state is neither used nor
changed. llguidance has no logits processor of its own for transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pass_ext.decoding.requests.grammar import Grammar, allow_tokens
from pass_ext.decoding.requests.processors import processor_name

__all__ = ["LLGuidance", "XGrammar", "allow_tokens", "grammars_of"]
_LONGEST_FORCED = 256  # characters
_XGRAMMAR = "xgrammar.contrib.hf.LogitsProcessor"
_OUTLINES_XGRAMMAR = "outlines.backends.xgrammar.XGrammarLogitsProcessor"
_OUTLINES_LLGUIDANCE = "outlines.backends.llguidance.LLGuidanceLogitsProcessor"


def _forbid(words: Tensor, tokens: Sequence[int]) -> None:
    for token in tokens:
        bit = 1 << token % 32
        words[token // 32] &= ~(bit - (bit >> 31 << 32))


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
        if token in self._stops or not 0 <= token < self._tokenizer.vocab_size:
            return False
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return taken

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check()

    def fill_mask(self, words: Tensor) -> None:
        """llguidance's own stop tokens are not allowed: ``generate`` allows the end tokens of the text."""
        size = self._tokenizer.vocab_size
        if -(-size // 32) != len(words):
            raise ValueError(
                f"LLGuidance: tokenizer must have n_vocab= the model's vocabulary, {32 * len(words) - 31} to {32 * len(words)} "
                f"tokens, got {size}"
            )
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        self._check()
        _forbid(words, self._stops)

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def forced(self) -> Sequence[int]:
        return list(self._matcher.compute_ff_tokens())

    def fork(self) -> LLGuidance:
        other = LLGuidance.__new__(LLGuidance)
        other._set(self._matcher.deep_copy(), self._tokenizer)
        return other


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
        return token not in self._stops and bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill_mask(self, words: Tensor) -> None:
        """xgrammar's own stop tokens are not allowed: ``generate`` allows the end tokens of the text."""
        try:
            self._matcher.fill_next_token_bitmask(words[None], 0)
        except RuntimeError as error:
            raise ValueError(
                "XGrammar: grammar must be compiled with TokenizerInfo(vocab_size=) the model's vocabulary, "
                f"{32 * len(words) - 31} to {32 * len(words)} tokens, got: {error}"
            ) from error
        _forbid(words, self._stops)

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def forced(self) -> Sequence[int]:
        text = self._matcher.find_jump_forward_string() if self._encode is not None else ""
        return list(self._encode(text[:_LONGEST_FORCED])) if text and self._encode is not None else ()

    def fork(self) -> XGrammar:
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


def grammars_of(processors: Sequence[Any], texts: int) -> tuple[list[Grammar | None] | None, list[Any]]:
    """The grammars in a list of processors, one for each text or None; and the processors that still have to run, in order."""
    rest: list[Any] = []
    grammars: list[Grammar | None] | None = None
    for processor in processors:
        new = _grammars(processor, texts)
        if new is None:
            rest.append(processor)
        elif grammars is not None:
            raise ValueError(
                "custom_generate: logits_processor must hold one grammar at most, got a second one, "
                f"{processor_name(processor)}"
            )
        else:
            grammars = new
    return grammars, rest


def _grammars(processor: Any, texts: int) -> list[Grammar | None] | None:
    """The processor's grammars; None if it is none of the known kinds, or holds its grammar elsewhere. A subclass may do
    something else, so it is none."""
    name = processor_name(type(processor))
    if name == _XGRAMMAR and hasattr(processor, "compiled_grammars"):
        compiled = list(processor.compiled_grammars)
        # After its first call the list has one entry per text of that call, all equal if one was given.
        if len(compiled) > 1 and all(other is compiled[0] for other in compiled):
            compiled = compiled[:1]
        if len(compiled) not in (1, texts):
            raise ValueError(
                f"custom_generate: logits_processor {name} must have one grammar, or one for each of the {texts} texts, got "
                f"{len(compiled)}"
            )
        return [XGrammar(grammar) for grammar in compiled * (1 if len(compiled) == texts else texts)]
    if name == _OUTLINES_XGRAMMAR and hasattr(processor, "compiled_grammar"):
        return [XGrammar(processor.compiled_grammar)] * texts
    if name == _OUTLINES_LLGUIDANCE and hasattr(processor, "llg_tokenizer"):
        return [LLGuidance(processor.llg_tokenizer, processor.grammar)] * texts
    return None

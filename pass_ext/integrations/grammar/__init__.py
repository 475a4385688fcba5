"""Grammars of other libraries for ``pass_ext.generate(grammar=…)``: ``XGrammar`` and ``LLGuidance``.

``allow_tokens`` writes the mask of a grammar of one's own (``pass_ext.Grammar``).
``grammars_of(processors)`` makes them from logits processors for transformers, as ``custom_generate`` does.
"""

from pass_ext.decoding.requests.grammar import allow_tokens
from pass_ext.integrations.grammar.llguidance import LLGuidance
from pass_ext.integrations.grammar.processors import grammars_of
from pass_ext.integrations.grammar.xgrammar import XGrammar

__all__ = ["LLGuidance", "XGrammar", "allow_tokens", "grammars_of"]

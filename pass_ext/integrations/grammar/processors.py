"""``grammars_of``: turns the logits processors in which libraries pack a grammar for transformers into ``pass_ext.Grammar``s.

    xgrammar.contrib.hf.LogitsProcessor                    its compiled grammars, one or one for each text
    outlines.backends.xgrammar.XGrammarLogitsProcessor     its compiled grammar
    outlines.backends.llguidance.LLGuidanceLogitsProcessor its grammar and tokenizer

They follow one text, call by call, so they cannot run on a tree's candidates themselves. Their state is neither used nor
changed. llguidance has no logits processor of its own for transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pass_ext.decoding.requests.grammar import Grammar
from pass_ext.decoding.requests.processors import processor_name
from pass_ext.integrations.grammar.llguidance import LLGuidance
from pass_ext.integrations.grammar.xgrammar import XGrammar

_XGRAMMAR = "xgrammar.contrib.hf.LogitsProcessor"
_OUTLINES_XGRAMMAR = "outlines.backends.xgrammar.XGrammarLogitsProcessor"
_OUTLINES_LLGUIDANCE = "outlines.backends.llguidance.LLGuidanceLogitsProcessor"


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

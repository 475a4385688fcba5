"""Refuses logits processors that keep state between calls, and explains the errors of unknown ones.

A processor is called for every candidate of a tree, accepted or not, with rows in any order and number. It must therefore
compute its result from its arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]

# Processors of these packages follow one text: they advance by one token with every call.
_FOLLOW_A_TEXT = ("formatron", "outlines", "transformers_cfg", "xgrammar")
# Matchers of xgrammar, llguidance and guidance follow one text; a processor that holds some does so too.
_MATCHERS = ("GrammarMatcher", "LLInterpreter", "LLMatcher")
# transformers' processors with these words in their names run the model or count their calls.
_COUNT_CALLS = ("Guidance", "SynthID", "Whisper", "Codebooks", "Delay")


def processor_name(processor: Any) -> str:
    """``package.module.Class``, or a function's own name."""
    named = processor if hasattr(processor, "__qualname__") else type(processor)
    return f"{named.__module__}.{named.__qualname__}"


def flat_processors(processor: Any) -> list[Processor]:
    """The processors in a flat list, from a single one, nested lists, transformers' ``LogitsProcessorList``, or None."""
    if processor is None:
        return []
    if not isinstance(processor, (list, tuple)):
        return [processor]
    return [inner for part in processor for inner in flat_processors(part)]


def check_stateless(processors: Sequence[Any], *, one_text: bool) -> None:
    """Raises ValueError for a processor that is known to keep state between calls.

    one_text: True if a single prompt is decoded without candidates: calls then come as in transformers' own loop.
    """
    for processor in processors:
        check_stateless(getattr(processor, "processors", ()), one_text=one_text)
        counts = any(part in type(processor).__name__ for part in _COUNT_CALLS)
        kinds = type(getattr(processor, "__self__", processor)).__mro__
        follows = any(kind.__module__.split(".")[0] in _FOLLOW_A_TEXT for kind in kinds) or _holds_matcher(processor)
        if not counts and (one_text or not follows):
            continue
        way = (
            ""
            if counts
            else "; give its grammar as grammar=, or give it method Plain() and one prompt, where it meets no candidates"
        )
        raise ValueError(
            "generate: logits_processor must compute its result from ids and logits alone, because it is called for every "
            f"candidate of every text, got {processor_name(processor)}, which keeps state between calls or runs the "
            f"model{way}"
        )


def _holds_matcher(processor: Any) -> bool:
    """True if an attribute of the processor is a matcher, or a list of some."""
    values = list(getattr(processor, "__dict__", {}).values())
    values += [item for value in values if isinstance(value, (list, tuple)) for item in value[:1]]
    return any(type(value).__name__ in _MATCHERS for value in values)


@contextmanager
def explained(processor: Any, ids: Tensor) -> Iterator[None]:
    """Adds to an error of the processor its name and how it was called."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"generate: logits_processor {processor_name(processor)} raised {type(error).__name__}"
            f"{f': {error}' if str(error) else ''}. It was called with ids {list(ids.shape)}, a row for each candidate, and "
            "must compute its result from ids and logits alone: rows come in any number and order, and a processor that keeps "
            "state between calls does not work"
        ) from error

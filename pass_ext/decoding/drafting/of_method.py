"""The drafters of each method: a table by class. Any other object may make its own: ``DraftingMethod``.

A new method of the package is a class in methods.py, a file here with its drafters, and a line in this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

from pass_ext.decoding.arguments import type_of
from pass_ext.decoding.drafting.drafter import DraftContext, Drafter
from pass_ext.decoding.drafting.from_draft_model import multi_candidate_drafters, speculative_drafters
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.lookahead.drafter import lookahead_drafters
from pass_ext.decoding.methods import MultiCandidate, NGram, PaSS, Plain, Speculative
from pass_ext.decoding.rules import LONGEST_BRANCH


def drafters_of(method: Any, context: DraftContext) -> Sequence[Drafter]:
    """New drafters for one generation; refuses a rule that cannot judge what they propose."""
    drafters = _make(method, context)
    context.check_origins(*(drafter.name for drafter in drafters))
    for drafter in drafters:
        if (context.is_sampled or context.rule == LONGEST_BRANCH) and context.rule not in drafter.rules:
            raise ValueError(
                f"generate: rule must be {' or '.join(map(repr, drafter.rules))} for {drafter.name} candidates, got "
                f"{context.rule!r}"
            )
    return drafters


@singledispatch
def _make(method: Any, context: DraftContext) -> Sequence[Drafter]:
    make = getattr(method, "drafters", None)
    if isinstance(method, type) or not callable(make):
        raise TypeError(
            "generate: method must be Plain(), NGram(...), PaSS(...), Speculative(...), MultiCandidate(...), or an object with "
            f"drafters(context) (pass_ext.DraftingMethod), got {type_of(method)}"
        )
    return make(context)


_make.register(Plain, lambda method, context: [])
_make.register(NGram, ngram_drafters)
_make.register(PaSS, lookahead_drafters)
_make.register(Speculative, speculative_drafters)
_make.register(MultiCandidate, multi_candidate_drafters)

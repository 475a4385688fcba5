"""The methods that the demo compares, and a run of one method on one text: tokens, calls and seconds.

Seconds cover the whole call of ``generate``, pass_ext's or transformers'.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pass_ext
from pass_ext.decoding.methods import Method
from pass_ext.decoding.stats import GenerationStats

LOOKUP_TOKENS = 8  # candidates from n-grams, in pass_ext and in transformers
PLAIN, GREEDY, JOINED = "Plain", "transformers greedy", "PaSS + NGram"


@dataclass(frozen=True)
class Contender:
    """A method of ``pass_ext.generate``; or None and options, for transformers' own ``generate``."""

    name: str
    method: Method | None
    options: dict[str, Any] = field(default_factory=dict)


class Emitted(NamedTuple):
    """The tokens that one model call added to the text."""

    tokens: int
    accepted: int
    """The number of accepted drafts among them; they come first."""


class Run(NamedTuple):
    """One text by one contender."""

    tokens: list[int]
    steps: list[Emitted]
    stats: GenerationStats


def contenders(lookahead: pass_ext.LookaheadEmbedding | None, rows: Any = "auto") -> list[Contender]:
    """All methods for this model, PaSS only with look-ahead embeddings; ``rows`` as in ``PaSS``."""
    ngram = pass_ext.NGram(tokens=LOOKUP_TOKENS)
    methods = [
        Contender(PLAIN, pass_ext.Plain()),
        Contender(GREEDY, None),
        Contender("transformers prompt lookup", None, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
        Contender("NGram", ngram),
    ]
    if lookahead is not None:
        methods += [
            Contender("PaSS, two passes", pass_ext.PaSS(lookahead, passes=2, rows=rows)),
            Contender("PaSS, one pass", pass_ext.PaSS(lookahead, rows=rows)),
            Contender(JOINED, joined(lookahead, rows)),
        ]
    return methods


def joined(lookahead: pass_ext.LookaheadEmbedding, rows: Any = "auto") -> pass_ext.PaSS:
    """PaSS in one pass, with n-gram candidates in the same tree."""
    return pass_ext.PaSS(lookahead, rows=rows, ngram=pass_ext.NGram(tokens=LOOKUP_TOKENS))


def continued(model: Any, contender: Contender, ids: Tensor, new_tokens: int) -> Run:
    """The greedy continuation of a prompt ``ids [1, T]`` by one contender."""
    recorder = Recorder()
    started = time.perf_counter()
    if contender.method is not None:
        stats = pass_ext.generate(model, ids, contender.method, max_new_tokens=new_tokens, streamer=recorder).stats
        return Run(recorder.tokens, recorder.steps, replace(stats, seconds=time.perf_counter() - started))
    rows: list[int] = []

    def called(_module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        rows.append((options["input_ids"] if "input_ids" in options else arguments[0]).shape[1])

    hook = model.register_forward_pre_hook(called, with_kwargs=True)
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            streamer=recorder,
            **contender.options,
        )
    finally:
        hook.remove()
    seconds = time.perf_counter() - started
    return Run(recorder.tokens, recorder.steps, _of_transformers(recorder, rows, ids.shape[1], seconds))


class Recorder:
    """A streamer for pass_ext and for transformers that records which call emitted which tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.steps: list[Emitted] = []
        self._has_prompt = False

    def put(self, ids: Tensor) -> None:
        """Takes the prompt first; then, from transformers, the tokens of each call."""
        if self._has_prompt:
            self.put_step(ids.flatten().tolist(), ids.numel() - 1)
        self._has_prompt = True

    def put_step(self, tokens: list[int], accepted: int) -> None:
        """Takes the tokens of a call, from pass_ext."""
        self.tokens += tokens
        self.steps.append(Emitted(len(tokens), accepted))

    def end(self) -> None:
        """Does nothing; streamers have this method."""


def _of_transformers(recorder: Recorder, rows: list[int], prompt: int, seconds: float) -> GenerationStats:
    """Statistics of transformers by pass_ext's definitions: a call with more rows than the text needs has verified a draft."""
    first = rows[0] - prompt  # prompt lookup drafts in its first call already
    drafted = [first, *(count - 1 for count in rows[1:])]
    histogram = [0] * (max(step.accepted for step in recorder.steps) + 1)
    for count, step in zip(drafted, recorder.steps, strict=True):
        if count > 0:
            histogram[step.accepted] += 1
    return GenerationStats(
        tuple(histogram), sum(drafted), model_calls=len(rows), tokens=len(recorder.tokens), seconds=seconds
    )

"""The race: all contenders on one prompt after the other, in an order that is shuffled for every prompt."""

import gc
import random
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from benchmarks.decoding.prompts import Prompt
from benchmarks.decoding.texts import first_difference, loops
from benchmarks.harness.cases import Contender, Row

FEWEST_TOKENS = 64
"""The least tokens of a raced text."""


def in_turn(domains: Iterable[Sequence[Prompt]]) -> list[Prompt]:
    """Prompts of all domains in turn, so that a race cut short has some of each."""
    return [prompt for turn in zip_longest(*domains) for prompt in turn if prompt is not None]


def one_round(
    prompt: Prompt,
    contenders: Sequence[Contender],
    most: int,
    order: random.Random,
    text: Sequence[int],
) -> list[Row]:
    """Rows of every contender on one prompt, in shuffled order; `text` is Plain's."""
    shuffled, looping = list(contenders), loops(text)
    order.shuffle(shuffled)
    runs = []
    for contender in shuffled:
        gc.disable()  # a collection would be charged to the contender that happens to run
        try:
            outcome = contender(prompt.ids, most)
        finally:
            gc.enable()
        runs.append(
            {
                "domain": prompt.domain,
                "prompt": prompt.name,
                "looping": looping,
                "contender": contender.name,
                "tokens": len(outcome.tokens),
                "calls": outcome.calls,
                "seconds": round(outcome.seconds, 5),
                "differs_at": first_difference(text, outcome.tokens),
                "drafted": outcome.drafted,
                "histogram": outcome.histogram,
            }
        )
    return runs

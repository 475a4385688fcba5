"""The race: all contenders on one prompt after the other, in an order that a fixed seed shuffles for every prompt.

Plain continues each prompt first. The prompt is raced if Plain's text is long enough and the limit is not reached: one limit
holds for texts that loop and one for texts that do not.
"""

import gc
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from benchmarks.decoding.contenders import Setting
from benchmarks.decoding.prompts import Prompt
from benchmarks.decoding.texts import first_difference, loops, period_share, repeated_share
from benchmarks.harness.cases import Contender, Row

FEWEST_TOKENS = 64
"""The least tokens of a raced text."""


@dataclass(frozen=True)
class Limits:
    """The numbers of prompts and tokens of a race."""

    most_tokens: int
    straight: int
    """Prompts per domain whose text does not loop."""
    looping: int
    out_of_time: Callable[[], bool]
    seed: int = 0


def in_turn(domains: Iterable[Sequence[Prompt]]) -> list[Prompt]:
    """Prompts of all domains in turn, so that a race cut short has some of each."""
    return [prompt for turn in zip_longest(*domains) for prompt in turn if prompt is not None]


def race(
    prompts: Sequence[Prompt],
    contenders: Sequence[Contender],
    setting: Setting,
    limits: Limits,
    report: Callable[[str], None] = lambda words: None,
) -> tuple[list[Row], list[Row]]:
    """A row per prompt that the first contender, Plain, continued, and a row per prompt and contender raced."""
    order = random.Random(limits.seed)
    seen: list[Row] = []
    runs: list[Row] = []
    left = {(p.domain, kind): limits.looping if kind else limits.straight for p in prompts for kind in (False, True)}
    for number, prompt in enumerate(prompts):
        if not any(left[prompt.domain, kind] for kind in (False, True)):
            continue
        if runs and limits.out_of_time():
            break
        seed = limits.seed + number
        report(f"{setting.name}: {prompt.domain} {prompt.name}")
        text = contenders[0](prompt.ids, setting, seed, limits.most_tokens).tokens
        entry, kind = described(prompt, setting, text), loops(text)
        entry["raced"] = len(text) >= min(FEWEST_TOKENS, limits.most_tokens) and left[prompt.domain, kind] > 0
        seen.append(entry)
        if not entry["raced"]:
            continue
        left[prompt.domain, kind] -= 1
        runs += one_round(prompt, contenders, setting, seed, limits.most_tokens, order, text, report)
    return seen, runs


def one_round(
    prompt: Prompt,
    contenders: Sequence[Contender],
    setting: Setting,
    seed: int,
    most: int,
    order: random.Random,
    text: Sequence[int],
    report: Callable[[str], None] = lambda words: None,
) -> list[Row]:
    """Rows of every contender on one prompt, in shuffled order; `text` is Plain's."""
    shuffled, looping = list(contenders), loops(text)
    order.shuffle(shuffled)
    runs = []
    for contender in shuffled:
        report(f"{setting.name}: {prompt.domain} {prompt.name}, {contender.name}")
        gc.disable()  # a collection would be charged to the contender that happens to run
        try:
            outcome = contender(prompt.ids, setting, seed, most)
        finally:
            gc.enable()
        runs.append(
            {
                "setting": setting.name,
                "domain": prompt.domain,
                "prompt": prompt.name,
                "looping": looping,
                "contender": contender.name,
                "tokens": len(outcome.tokens),
                "calls": outcome.calls,
                "seconds": round(outcome.seconds, 5),
                "differs_at": first_difference(text, outcome.tokens),
                "drafted": outcome.drafted,
                "draft_calls": outcome.draft_calls,
                "histogram": outcome.histogram,
            }
        )
    return runs


def described(prompt: Prompt, setting: Setting, text: Sequence[int]) -> Row:
    """The row of a prompt: lengths, and shares of repeated tokens."""
    return {
        "setting": setting.name,
        "domain": prompt.domain,
        "prompt": prompt.name,
        "prompt_tokens": len(prompt.ids),
        "tokens": len(text),
        "repeated_share": round(repeated_share(text), 3),
        "period_share": round(period_share(text), 3),
        "looping": loops(text),
    }

"""The race: all contenders on one prompt, one after the other, in an order shuffled anew for every prompt by a fixed seed.

Prompts are first continued by Plain alone, which says whether the text is long enough and whether it loops; of each kind
only so many are raced.
"""

import gc
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from benchmarks.decoding.contenders import Contender, Setting
from benchmarks.decoding.prompts import Prompt
from benchmarks.decoding.texts import first_difference, loops, period_share, repeated_share

FEWEST_TOKENS = 64
"""A text that ends sooner is not raced."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """How much is raced."""

    most_tokens: int
    straight: int
    """Prompts per domain whose continuation does not loop."""
    looping: int
    out_of_time: Callable[[], bool]
    seed: int = 0


def in_turn(domains: Iterable[Sequence[Prompt]]) -> list[Prompt]:
    """One of each domain after the other, so that a race cut short has had some of each."""
    return [prompt for turn in zip_longest(*domains) for prompt in turn if prompt is not None]


def race(
    prompts: Sequence[Prompt],
    contenders: Sequence[Contender],
    setting: Setting,
    limits: Limits,
    told: Callable[[str], None] = lambda what: None,
) -> tuple[list[Row], list[Row]]:
    """-> a row per prompt seen (its text by the first contender, Plain), and a row per prompt and contender raced."""
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
        told(f"{setting.name}: {prompt.domain} {prompt.name}")
        text = contenders[0].write(prompt.ids, setting, seed, limits.most_tokens).tokens
        entry, kind = described(prompt, setting, text), loops(text)
        entry["raced"] = len(text) >= min(FEWEST_TOKENS, limits.most_tokens) and left[prompt.domain, kind] > 0
        seen.append(entry)
        if not entry["raced"]:
            continue
        left[prompt.domain, kind] -= 1
        runs += one_round(prompt, contenders, setting, seed, limits.most_tokens, order, text, told)
    return seen, runs


def one_round(
    prompt: Prompt,
    contenders: Sequence[Contender],
    setting: Setting,
    seed: int,
    most: int,
    order: random.Random,
    text: Sequence[int],
    told: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Every contender once, in an order of this round's own; `text` is what Plain wrote."""
    shuffled, looping = list(contenders), loops(text)
    order.shuffle(shuffled)
    runs = []
    for contender in shuffled:
        told(f"{setting.name}: {prompt.domain} {prompt.name}, {contender.name}")
        gc.disable()  # a collection would fall on whoever happens to run
        try:
            outcome = contender.write(prompt.ids, setting, seed, most)
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
    """What is recorded of a prompt."""
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

"""Sums single texts into rows of a table.

speed-up = (Plain's seconds / Plain's tokens) / (a contender's seconds / its tokens), sums over the same prompts
spread   = 10th and 90th percentile over prompts drawn with replacement
"""

import random
from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.decoding.contenders import PLAIN
from benchmarks.harness.cases import Row

RESAMPLED = 500
ALL = "all"


def summarise(runs: Sequence[Row]) -> list[Row]:
    """A row per domain and contender, those that loop apart; and for `all` domains where there are several."""
    rows = []
    for looping in sorted({run["looping"] for run in runs}):
        some = [run for run in runs if run["looping"] == looping]
        domains = list(dict.fromkeys(run["domain"] for run in some))
        for domain in [*domains, *([ALL] if len(domains) > 1 else [])]:
            rows += _rows_of_set([r for r in some if domain in (ALL, r["domain"])], domain)
    return rows


def _rows_of_set(runs: Sequence[Row], domain: str) -> list[Row]:
    """The rows of one set of prompts, Plain's first, then by name."""
    by_contender: dict[str, dict[tuple[str, str], Row]] = {}
    for run in runs:
        by_contender.setdefault(run["contender"], {})[run["domain"], run["prompt"]] = run
    plain = by_contender[PLAIN]
    names = sorted(by_contender, key=lambda name: (name != PLAIN, name))
    return [_row(name, by_contender[name], plain, domain) for name in names]


def _row(name: str, by_prompt: dict[tuple[str, str], Row], plain: dict[tuple[str, str], Row], domain: str) -> Row:
    runs = list(by_prompt.values())
    pairs = [(run, plain[prompt]) for prompt, run in by_prompt.items()]
    tokens, seconds, calls = (sum(run[key] for run in runs) for key in ("tokens", "seconds", "calls"))
    steps = sum(sum(run["histogram"]) for run in runs)
    accepted = sum(i * count for run in runs for i, count in enumerate(run["histogram"]))
    drafted = sum(run["drafted"] for run in runs)
    spread = resampled(pairs)
    singles = [speed_up([pair]) for pair in pairs]
    differing = [run["differs_at"] for run in runs if run["differs_at"] is not None]
    return {
        "looping": runs[0]["looping"],
        "domain": domain,
        "contender": name,
        "prompts": len(runs),
        "tokens": tokens,
        "tokens_per_call": tokens / calls,
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "ms_per_token": 1e3 * seconds / tokens,
        "tokens_per_second": tokens / seconds,
        "speed_up": speed_up(pairs),
        "speed_up_p10": spread[0],
        "speed_up_p90": spread[1],
        "slowest_prompt": min(singles),
        "equal_texts": len(runs) - len(differing),
        "first_difference": median(differing) if differing else None,
    }


def speed_up(pairs: Iterable[tuple[Row, Row]]) -> float:
    """The speed-up of runs, each paired with Plain's on the same prompt."""
    sums = [0.0] * 4
    for run, plain in pairs:
        for i, value in enumerate((plain["seconds"], plain["tokens"], run["seconds"], run["tokens"])):
            sums[i] += value
    return sums[0] / sums[1] / (sums[2] / sums[3])


def resampled(pairs: Sequence[tuple[Row, Row]]) -> tuple[float, float]:
    """The 10th and 90th percentile of the speed-up over pairs drawn with replacement."""
    draw = random.Random(0)
    drawn = sorted(speed_up(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLED))
    return drawn[RESAMPLED // 10], drawn[RESAMPLED * 9 // 10]

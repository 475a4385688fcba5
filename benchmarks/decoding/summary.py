"""Sums single texts into rows of a table, and judges the aims from the rows.

speed-up = (Plain's seconds / Plain's tokens) / (a contender's seconds / its tokens), sums over the same prompts
spread   = 10th and 90th percentile over prompts drawn with replacement
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any, TypeVar

from benchmarks.decoding.contenders import GREEDY, HF, ONE_PASS, OURS, PLAIN, TWO_PASS
from benchmarks.decoding.prompts import DOMAINS
from benchmarks.harness.aims import NOT_MEASURED
from benchmarks.harness.cases import Row
from benchmarks.harness.plan import Aim

T = TypeVar("T")
RESAMPLED = 500
ALL = "all"
LEAST = 0.95
"""The least speed-up of a method on any set of prompts."""


def summarise(runs: Sequence[Row]) -> list[Row]:
    """A row per setting, looping or not, domain and contender; and for `all` domains where there are several."""
    rows = []
    sets = {(run["setting"], run["looping"], run["domain"]) for run in runs}
    for setting, looping in sorted({key[:2] for key in sets}, key=lambda key: (key[0] != GREEDY.name, key)):
        some = [run for run in runs if (run["setting"], run["looping"]) == (setting, looping)]
        domains = list(dict.fromkeys(run["domain"] for run in some))
        for domain in [*domains, *([ALL] if len(domains) > 1 else [])]:
            rows += summarise_set([r for r in some if domain in (ALL, r["domain"])], domain)
    return rows


def summarise_set(runs: Sequence[Row], domain: str) -> list[Row]:
    """The rows of one set of prompts: pass_ext's methods, Plain first, then the others by name."""
    by_contender: dict[str, dict[tuple[str, str], Row]] = {}
    for run in runs:
        by_contender.setdefault(run["contender"], {})[run["domain"], run["prompt"]] = run
    plain = by_contender[PLAIN]
    names = sorted(by_contender, key=lambda name: (OURS.index(name) if name in OURS else len(OURS), name))
    return [_row(name, by_contender[name], plain, domain) for name in names]


def _row(name: str, by_prompt: dict[tuple[str, str], Row], plain: dict[tuple[str, str], Row], domain: str) -> Row:
    runs = list(by_prompt.values())
    pairs = [(run, plain[prompt]) for prompt, run in by_prompt.items()]
    tokens, seconds, calls = (sum(run[key] for run in runs) for key in ("tokens", "seconds", "calls"))
    steps = sum(sum(run["histogram"]) for run in runs)
    accepted = sum(i * count for run in runs for i, count in enumerate(run["histogram"]))
    drafted = sum(run["drafted"] for run in runs)
    spread = resampled(pairs, speed_up)
    singles = [speed_up([pair]) for pair in pairs]
    differing = [run["differs_at"] for run in runs if run["differs_at"] is not None]
    return {
        "setting": runs[0]["setting"],
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


def resampled(items: Sequence[T], statistic: Callable[[Sequence[T]], float]) -> tuple[float, float]:
    """The 10th and 90th percentile of a statistic over items drawn with replacement."""
    draw = random.Random(0)
    drawn = sorted(statistic(draw.choices(items, k=len(items))) for _ in range(RESAMPLED))
    return drawn[RESAMPLED // 10], drawn[RESAMPLED * 9 // 10]


def judge(rows: Sequence[Row], agreement: Sequence[Row], device: str) -> list[Aim]:
    """The aims of whole texts. A shortfall within the noise, up to the 90th percentile of a speed-up, fails none."""
    one_pass = 1.5 if device == "cpu" else 2.2
    straight = [row for row in rows if row["setting"] == GREEDY.name and not row["looping"]]
    return [
        _at_least(
            f"two-pass PaSS ≥ 1.3 × Plain, greedy, texts that do not loop ({ALL} domains)", 1.3, straight, TWO_PASS
        ),
        _at_least(
            f"one-pass PaSS ≥ {one_pass} × Plain, greedy, texts that do not loop ({ALL} domains)",
            one_pass,
            straight,
            ONE_PASS,
        ),
        _never_below(rows),
        _fair_plain(straight),
        _equal(agreement),
    ]


def _at_least(aim: str, least: float, rows: Sequence[Row], contender: str) -> Aim:
    by_domain = {row["domain"]: row for row in rows if row["contender"] == contender}
    total = by_domain.get(ALL) or next(iter(by_domain.values()), None)
    if total is None:
        return Aim(aim, None, NOT_MEASURED)
    each = ", ".join(f"{domain} {row['speed_up']:.2f}" for domain, row in by_domain.items())
    none = [f"no text of {domain}" for domain in DOMAINS if domain not in by_domain]
    return Aim(aim, total["speed_up"] >= least, "; ".join([f"{each} × ({total['prompts']} prompts)", *none]))


def _never_below(rows: Sequence[Row]) -> Aim:
    aim = f"no method of ours below {LEAST} × Plain on any set of prompts"
    ours = [row for row in rows if row["contender"] in OURS and row["contender"] != PLAIN]
    if not ours:
        return Aim(aim, None, NOT_MEASURED)
    worst = min(ours, key=lambda row: row["speed_up"])
    short = sum(row["speed_up_p90"] < LEAST for row in ours)
    kind = "looping" if worst["looping"] else "not looping"
    where = f"{worst['contender']} on {worst['domain']}, {kind}, {worst['setting']}"
    return Aim(
        aim,
        short == 0,
        f"least {worst['speed_up']:.2f} × ({where}); below, beyond noise, on {short} of {len(ours)} sets",
    )


def _fair_plain(rows: Sequence[Row]) -> Aim:
    aim = "Plain no slower than transformers' generate"
    theirs = {row["domain"]: row for row in rows if row["contender"] == HF}
    total = theirs.get(ALL) or next(iter(theirs.values()), None)
    if total is None:
        return Aim(aim, None, NOT_MEASURED)
    each = ", ".join(f"{domain} {1 / row['speed_up']:.2f}" for domain, row in theirs.items())
    return Aim(aim, total["speed_up_p10"] <= 1, f"Plain is {each} × as fast")


def _equal(agreement: Sequence[Row]) -> Aim:
    aim = "float32: every text equal to transformers' greedy one, token for token"
    if not agreement:
        return Aim(aim, None, NOT_MEASURED)
    texts, equal = (sum(row[key] for row in agreement) for key in ("texts", "equal_texts"))
    wrong = [
        f"{row['contender']} {row['equal_texts']} of {row['texts']}"
        for row in agreement
        if row["equal_texts"] < row["texts"]
    ]
    return Aim(aim, equal == texts, f"{equal} of {texts} texts" + (f" ({', '.join(wrong)})" if wrong else ""))


def summarise_sweep(runs: Sequence[Row], plans: Mapping[str, Any]) -> list[Row]:
    """A row per method of the sweep over all its prompts, with the numbers of its plan."""
    rows = []
    for row in summarise_set(runs, ALL):
        plan = plans.get(row["contender"])
        if plan is not None:
            row |= {"planned_rows": plan.rows, "planned_tokens_per_call": plan.tokens_per_call}
            row["planned_speed_up"] = plan.speedup
        rows.append(row)
    order = list(dict.fromkeys(run["contender"] for run in sorted(runs, key=lambda run: run["order"])))
    return sorted(rows, key=lambda row: order.index(row["contender"]))


def summarise_agreement(runs: Sequence[Row]) -> list[Row]:
    """A row per contender with its number of texts equal to the reference."""
    rows = []
    for name, group in groupby(sorted(runs, key=lambda run: run["contender"]), key=lambda run: run["contender"]):
        some = list(group)
        differing = [run["differs_at"] for run in some if run["differs_at"] is not None]
        rows.append(
            {
                "contender": name,
                "texts": len(some),
                "equal_texts": len(some) - len(differing),
                "tokens": sum(run["tokens"] for run in some),
                "first_difference": fmean(differing) if differing else None,
            }
        )
    return rows

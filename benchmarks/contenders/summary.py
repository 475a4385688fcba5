"""Sums the rounds of a run into a line per contender, and judges the aims.

    tokens/s         median of the rounds
    against          the median, over rounds, of a contender's tokens/s divided by those of the baseline in the same round
    tokens per call  sum of tokens / sum of calls

The baseline is llama.cpp without speculation; where there are two builds of it, the faster one of this run; else Plain.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.contenders import roster
from benchmarks.contenders.rounds import MOST_OTHERS
from benchmarks.contenders.workers import names
from benchmarks.harness.aims import NOT_MEASURED
from benchmarks.harness.plan import Aim

Row = dict[str, Any]
PARTS = ("layers", "small", "loop")
METHODS = (names.NGRAM, names.PASS, names.ADAPTED, names.JOINED)
MOST_MS_OUTSIDE = 2.0
MOST_MS_LOOP = 0.5


def undisturbed(rows: Sequence[Row], most_others: float = MOST_OTHERS) -> list[Row]:
    """The rows of the rounds in which no turn was disturbed."""
    disturbed = {row["round"] for row in rows if row["others"] > most_others}
    return [row for row in rows if row["round"] not in disturbed]


def counted(result: Row) -> list[Row]:
    """The rows of a result that count."""
    return undisturbed(result["rows"], result.get("settings", {}).get("most_others", MOST_OTHERS))


def baseline_of(rows: Sequence[Row]) -> str | None:
    """The name of the baseline in these rows: llama.cpp, or Plain where it did not run."""
    return llama_of(rows) or (names.PLAIN if _speeds(rows, names.PLAIN) else None)


def llama_of(rows: Sequence[Row]) -> str | None:
    """The faster build of llama.cpp without speculation; None without any."""
    speeds = {name: _speeds(rows, name) for name in (roster.LLAMA, roster.LLAMA_NATIVE)}
    present = {name: median(by_round.values()) for name, by_round in speeds.items() if by_round}
    return max(present, key=lambda name: present[name]) if present else None


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line for each contender in these undisturbed rows, the fastest first."""
    baseline = baseline_of(rows)
    base = _speeds(rows, baseline) if baseline else {}
    out = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        runs = [row for row in rows if row["contender"] == name]
        speeds = _speeds(rows, name)
        ratios = [speed / base[turn] for turn, speed in speeds.items() if turn in base]
        out.append(
            {
                "contender": name,
                "rounds": len(runs),
                "tokens_per_second": _spread(list(speeds.values())),
                "tokens_per_call": sum(row["tokens"] for row in runs) / sum(row["calls"] for row in runs),
                "against": _spread(ratios) if ratios else None,
                "same_text": sum(row["differs_at"] is None for row in runs),
                "same_as_float32": sum(row["differs_from_float32_at"] is None for row in runs),
            }
        )
    return sorted(out, key=lambda line: -line["tokens_per_second"][0])


def ratios_of(rows: Sequence[Row], name: str, other: str) -> list[float]:
    """Tokens per second of one contender over those of another, round by round."""
    ours, theirs = _speeds(rows, name), _speeds(rows, other)
    return [speed / theirs[turn] for turn, speed in ours.items() if turn in theirs]


def parts(result: Row) -> list[Row]:
    """The parts of a step of each contender measured, with the machine's limit and its share where there is one."""
    limits = result["parts"].get("limits")
    out = []
    for name, measured in result["parts"].items():
        if name == "limits" or limits is None:
            continue
        read, peak = 1e9 * limits["read_gb_per_s"], 1e9 * limits["gflop_per_s"]
        seconds = {part: count / read for part, count in measured["bytes"].items()}
        for part, count in measured["flops"].items():
            seconds[part] = max(seconds[part], count / peak)
        out.append(
            {
                "contender": name,
                "rows": measured["rows"],
                "once_ms": measured["once_ms"],
                "ms": {part: measured["ms"][part] for part in PARTS},
                "limit_ms": {part: 1e3 * seconds[part] for part in PARTS if part in seconds},
                "share": {part: 1e3 * seconds[part] / measured["ms"][part] for part in PARTS if part in seconds},
            }
        )
    return out


def judge(result: Row) -> list[Aim]:
    """The aims of a step at the machine's speed."""
    rows = counted(result)
    speeds = {line["contender"]: line["tokens_per_second"][0] for line in lines(rows)}
    baseline = llama_of(rows)
    best = max((name for name in METHODS if name in speeds), key=lambda name: speeds[name], default=None)
    lookups = [name for name in speeds if name.startswith(roster.LLAMA) and name not in roster.PLAIN_LLAMA]
    lookup = max(lookups, key=lambda name: speeds[name], default=None)
    plain = next((line for line in parts(result) if line["contender"] == names.PLAIN), None)
    return [
        _ratio("Plain at least as fast as llama.cpp", 1.0, rows, names.PLAIN, baseline),
        _ratio("the best method 1.3 times as fast as llama.cpp", 1.3, rows, best, baseline),
        _ratio("the best method at least as fast as llama.cpp's best speculation", 1.0, rows, best, lookup),
        _milliseconds("Plain: small ops of a call", MOST_MS_OUTSIDE, plain, "small"),
        _milliseconds("Plain: the loop outside the model", MOST_MS_LOOP, plain, "loop"),
    ]


def _ratio(aim: str, least: float, rows: Sequence[Row], name: str | None, other: str | None) -> Aim:
    ratios = ratios_of(rows, name, other) if name and other else []
    if not ratios:
        return Aim(aim, None, NOT_MEASURED)
    return Aim(aim, median(ratios) >= least, f"{median(ratios):.2f} × ({name} against {other})")


def _milliseconds(aim: str, most: float, line: Row | None, part: str) -> Aim:
    words = f"{aim} in at most {most:g} ms"
    if line is None:
        return Aim(words, None, NOT_MEASURED)
    return Aim(words, line["ms"][part] <= most, f"{line['ms'][part]:.2f} ms")


def _speeds(rows: Sequence[Row], name: str) -> dict[int, float]:
    return {row["round"]: row["tokens"] / row["seconds"] for row in rows if row["contender"] == name}


def _spread(values: Sequence[float]) -> list[float]:
    """The median, the lowest and the highest."""
    return [median(values), min(values), max(values)]

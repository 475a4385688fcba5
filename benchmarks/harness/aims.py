"""Aims: what a benchmark promises, judged from the rows that it measured.

A line holds the rows of one case, measured in turn; `name` says a line in a few words. An aim is judged from rows alone, never
from a constant, and `met` is None where the run has no row that tells.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.cases import OURS, Row
from benchmarks.harness.plan import Aim
from benchmarks.harness.results import gain, noise

Line = list[Row]
Name = Callable[[Line], str]
NOT_MEASURED = "on no line of this run"


def times_of(lines: list[Line], contender: str, name: Name) -> dict[str, float]:
    """Line -> this contender's median over ours; lines on which it does the same job."""
    return {
        name(line): row["times_ours"]
        for line in lines
        for row in line
        if row["contender"] == contender and row["same_job"] and row["median_us"] is not None
    }


def fastest_of(lines: list[Line], name: Name, contenders: Sequence[str] | None = None) -> dict[str, float]:
    """Line -> the median of the fastest other contender over ours; ``contenders``: of these alone, ours first."""
    some = [[row for row in line if contenders is None or row["contender"] in contenders] for line in lines]
    return {name(line): times for line in some if (times := gain(line)) is not None}


def at_least(aim: str, least: float, times: dict[str, float], absent: str | None = None) -> Aim:
    """Met if ours is that many times faster on every line. `absent`: the reason where there is no line."""
    if not times:
        return Aim(aim, None, absent or NOT_MEASURED)
    worst = min(times, key=times.__getitem__)
    short = sum(value < least for value in times.values())
    return Aim(
        aim, not short, f"least {times[worst]:.2f} × ({worst}); below {least} × on {short} of {len(times)} lines"
    )


def at_most(aim: str, most_us: float, rows: list[Row], name: Name) -> Aim:
    """Met if no row takes more microseconds."""
    if not rows:
        return Aim(aim, None, NOT_MEASURED)
    slowest = max(rows, key=lambda row: row["median_us"])
    return Aim(aim, slowest["median_us"] <= most_us, f"at most {slowest['median_us']:.2f} µs ({name([slowest])})")


def never_slower(lines: list[Line], name: Name) -> Aim:
    """Met if no other contender is faster by more than the noise of its line."""
    slower = [f"{name(line)}: {gain(line):.2f} ×" for line in lines if (gain(line) or 1) < 1 - noise(line)]
    return Aim("never slower than any plain way, beyond the noise", not slower, "; ".join(slower) or "on no line")


def share_of(aim: str, bandwidth: str, least: float, rows: list[Row], name: Name) -> Aim:
    """Met if every row has that share of a rate: `bandwidth` is of_copy, of_read or of_limit."""
    if not rows:
        return Aim(aim, None, NOT_MEASURED)
    worst = min(rows, key=lambda row: row[bandwidth])
    short = sum(row[bandwidth] < least for row in rows)
    return Aim(aim, not short, f"least {worst[bandwidth]:.0%} ({name([worst])}); below on {short} of {len(rows)} lines")


def filters_cost(most: float, lines: list[Line], ignored: Sequence[str], name: Name) -> Aim:
    """Met if a line with filters takes at most that many times the line without; other labels equal, except `ignored`."""
    aim = f"filters on: at most {most:g} × the time without"

    def without_filters(line: Line) -> str:
        labels = {key: value for key, value in line[0]["labels"].items() if key not in ("filters", *ignored)}
        return f"{labels} {line[0]['how']} {line[0]['cache']}"

    off = {without_filters(line): line[0] for line in lines if line[0]["labels"]["filters"] == "off"}
    on = [line for line in lines if line[0]["labels"]["filters"] != "off" and without_filters(line) in off]
    costs = {name(line): line[0]["median_us"] / off[without_filters(line)]["median_us"] for line in on}
    if not costs:
        return Aim(aim, None, NOT_MEASURED)
    worst = max(costs, key=costs.__getitem__)
    over = sum(value > most for value in costs.values())
    return Aim(aim, not over, f"most {costs[worst]:.2f} × ({worst}); above {most:g} × on {over} of {len(costs)} lines")


def launches(aim: str, most: int, function: Callable[..., object], arguments: tuple[Any, ...]) -> Aim:
    """Met if the profiler sees at most that many kernels in one call on the GPU."""
    import torch

    from benchmarks.harness.gpu_timing import count_kernels

    with torch.inference_mode():
        count = count_kernels(function, arguments)
    return Aim(aim, None if count is None else count <= most, f"{count or 'not seen'} launched")


def rows_of_ours(rows: list[Row], how: Sequence[str] = ("call", "graph")) -> list[Row]:
    """The rows of pass_ext, measured in these ways: by default the device's own time."""
    return [row for row in rows if row["contender"] == OURS and row["how"] in how]

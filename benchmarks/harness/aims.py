"""Judging what several benches promise: so many times faster than somebody, a share of a bandwidth, a price of filters.

Every aim comes from measured rows alone; met is None where this run has no such line. `name` says a line in few words.
Used by accept.py, draft.py, attention.py and cache.py.
"""

from collections.abc import Callable, Sequence

from benchmarks.harness.cases import Row
from benchmarks.harness.plan import Aim
from benchmarks.harness.results import gain

Line = list[Row]
Name = Callable[[Line], str]
NOT_MEASURED = "on no line of this run"


def times_of(lines: list[Line], contender: str, name: Name) -> dict[str, float]:
    """Per line on which the contender does the same job, how many times ours it takes."""
    return {
        name(line): row["times_ours"]
        for line in lines
        for row in line
        if row["contender"] == contender and row["same_job"] and row["median_us"] is not None
    }


def fastest_of(lines: list[Line], contenders: Sequence[str], name: Name) -> dict[str, float]:
    """The same for the fastest of these; the first is ours."""
    some = [[row for row in line if row["contender"] in contenders] for line in lines]
    return {name(line): times for line in some if (times := gain(line)) is not None}


def at_least(aim: str, least: float, times: dict[str, float], absent: str | None = None) -> Aim:
    """Met if we are that many times faster on every line. `absent`: why there may be none."""
    if not times:
        return Aim(aim, None, absent or NOT_MEASURED)
    worst = min(times, key=times.__getitem__)
    short = sum(value < least for value in times.values())
    return Aim(
        aim, not short, f"least {times[worst]:.2f} × ({worst}); below {least} × on {short} of {len(times)} lines"
    )


def share_of(aim: str, bandwidth: str, least: float, rows: list[Row], name: Name) -> Aim:
    """Met if every row has that share: of_copy or of_read."""
    if not rows:
        return Aim(aim, None, NOT_MEASURED)
    worst = min(rows, key=lambda row: row[bandwidth])
    short = sum(row[bandwidth] < least for row in rows)
    return Aim(aim, not short, f"least {worst[bandwidth]:.0%} ({name([worst])}); below on {short} of {len(rows)} lines")


def filters_cost(most: float, lines: list[Line], ignored: Sequence[str], name: Name) -> Aim:
    """Met if filters take at most that many times as long as none, all labels equal but "filters" and those ignored."""
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

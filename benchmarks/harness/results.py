"""Results: saved as JSON, grouped into lines, shown as a table on the screen. benchmarks/README.md explains the fields."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness.machine import COMPARED

FORMAT = 1
LEFT_OUT = "Left out, too large or for lack of time"
SPEEDS = {"GB/s": "gb_per_s", "GFLOP/s": "gflop_per_s"}
SHARES = {"of copy": "of_copy", "of read": "of_read", "of limit": "of_limit"}
WORDS = {True: ("       met", "green"), False: ("   NOT met", "bold red"), None: ("not tested", "yellow")}


def save(result: dict[str, Any], path: Path) -> None:
    """Writes one result with a line per row, so that a diff can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    others = {key: value for key, value in result.items() if key != "rows"}
    text = json.dumps(others, indent=1, ensure_ascii=False)
    if result.get("rows"):
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in result["rows"])
        text = text.removesuffix("\n}") + f',\n "rows": [\n  {rows}\n ]\n}}'
    path.write_text(f"{text}\n")


def lines_of(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The rows of a result, grouped by labels, way and cache: the lines of its table."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        key = json.dumps([row["labels"], row["how"], row["cache"]])
        lines.setdefault(key, []).append(row)
    return list(lines.values())


def gain(line: list[dict[str, Any]]) -> float | None:
    """The median of the fastest other contender of the same job over ours; None where there is no other."""
    others = [row["times_ours"] for row in line[1:] if row["same_job"] and row["median_us"] is not None]
    return min(others, default=None)


def noise(line: list[dict[str, Any]]) -> float:
    """The largest `half_split` of a line's rows. A smaller difference between contenders is noise."""
    return max((row["half_split"] for row in line if row["median_us"] is not None), default=0.0)


def contender_names(result: dict[str, Any]) -> list[str]:
    """All contenders in order of appearance; those of another job last."""
    names = {row["contender"]: row["same_job"] for row in result["rows"]}
    return sorted(names, key=lambda name: not names[name])


def why_absent(result: dict[str, Any]) -> list[str]:
    """A sentence per contender without a number and reason, with the number of lines."""
    lines: dict[tuple[str, str], int] = {}
    for row in result["rows"]:
        if "reason" in row:
            key = (row["contender"], row["reason"])
            lines[key] = lines.get(key, 0) + 1
    return [f"Not timed: {name}, on {_lines(count)}: {reason}." for (name, reason), count in lines.items()]


def _lines(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'}"


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the result as a table, the fastest contender of each line in green, and then the aims."""
    names = contender_names(result)
    labels = list(result["rows"][0]["labels"])
    table = Table(title=f"{described(result)}, µs per call", title_justify="left")
    table.add_column(", ".join(labels))
    table.add_column("cache")
    for column in [*names, *gain_heads(result)]:
        table.add_column(column, justify="right")
    for line in lines_of(result):
        by_name = {row["contender"]: row for row in line}
        racing = [row["median_us"] for row in line if row["same_job"] and row["median_us"] is not None]
        cells: list[str | Text] = [", ".join(str(line[0]["labels"][label]) for label in labels), cache_of(line[0])]
        for name in names:
            row = by_name.get(name)
            style = "green" if row and row["median_us"] in racing and row["median_us"] == min(racing) else ""
            cells.append(Text(_number(row and row["median_us"]), style if row and row["same_job"] else "dim"))
        table.add_row(*cells, *gain_cells(line, result))
    console.print(table)
    for sentence in why_absent(result):
        console.print(sentence)
    show_aims(result, console)


def show_aims(result: dict[str, Any], console: Console) -> None:
    """Prints each aim with its verdict."""
    for aim in result["aims"]:
        console.print(Text.assemble(WORDS[aim["met"]], f"  {aim['aim']}: {aim['measured']}"))


def described(result: dict[str, Any]) -> str:
    """The title of a result: op family, type and device."""
    return f"{result['bench']}, {result['settings']['dtype']}, {device_name(result)}"


def device_name(result: dict[str, Any]) -> str:
    """The model of the GPU or processor that a result was measured on."""
    return result["machine"]["gpu"]["name"] if result["device"] == "cuda" else result["machine"]["cpu"]["model"]


def device_words(result: dict[str, Any], threads: int) -> str:
    """The GPU with driver and toolkit, or the processor's cores, threads in use and instruction set."""
    machine = result["machine"]
    if result["device"] == "cuda":
        return f"{machine['gpu']['name']}, driver {machine['gpu']['driver']}, CUDA {result['versions']['cuda']}"
    return f"{machine['cpu']['cores']} cores, {threads} threads used, {machine['kernels']['cpu_isa']}"


def provenance_of(result: dict[str, Any]) -> str:
    """A sentence: date, commit, device, versions and speeds of a result."""
    versions = result["versions"]
    device = device_words(result, result["machine"]["cpu"]["torch_threads"])
    others = "".join(f", {name} {versions[name]}" for name in COMPARED if name in versions)
    return (
        f"{result['date'][:10]}, commit {result['commit']}; {device}; "
        f"torch {versions['torch']}, Python {versions['python']}{others}; "
        f"a large copy moves {result['copy_gb_per_s']:.4g} GB/s (read + written)"
        + (f", a large read {result['read_gb_per_s']:.4g} GB/s" if _has_read_share(result) else "")
        + "".join(
            f", a large product in {dtype} computes {rate:.4g} GFLOP/s"
            for dtype, rate in result.get("matmul_gflop_per_s", {}).items()
        )
        + "."
    )


def _has_read_share(result: dict[str, Any]) -> bool:
    return any("of_read" in row for row in result["rows"])


def _has_limit_share(result: dict[str, Any]) -> bool:
    return any("of_limit" in row for row in result["rows"])


def gain_heads(result: dict[str, Any]) -> list[str]:
    """The heads of the columns about our row."""
    heads = ["gain", "GB/s", "of copy", *(["of read"] if _has_read_share(result) else [])]
    return [*heads, *(["GFLOP/s", "of limit"] if _has_limit_share(result) else [])]


def gain_cells(line: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    """The cells of one line in these columns."""
    ours, times = line[0], gain(line)
    cells = {"gain": "–" if times is None else f"{times:.2f} ×"} if ours["median_us"] is not None else {}
    cells |= {head: f"{ours[key]:.3g}" for head, key in SPEEDS.items() if key in ours}
    cells |= {head: f"{ours[key]:.0%}" for head, key in SHARES.items() if key in ours}
    return [cells.get(head, "–") for head in gain_heads(result)]


def cache_of(row: dict[str, Any]) -> str:
    """The state of the caches, and `graph` or `eager` for a row of a GPU."""
    return row["cache"] if row["how"] == "call" else f"{row['cache']}, {row['how']}"


def line_name(line: list[dict[str, Any]], *words: str) -> str:
    """A line in a few words: those that are not empty, then the state of the caches."""
    return ", ".join([*filter(None, words), cache_of(line[0])])


def with_spread(row: dict[str, Any] | None) -> str:
    """A median with its 10th and 90th percentile; – for a row without a number."""
    if row is None or row["median_us"] is None:
        return "–"
    return f"{_number(row['median_us'])} ({_number(row['p10_us'])}–{_number(row['p90_us'])})"


def _number(value: float | None) -> str:
    """Three digits, without exponents: 0.0123, 1.23, 12.3, 1234."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"

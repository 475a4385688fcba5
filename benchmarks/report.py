"""Results: saved as JSON, shown as a table on the screen, and rendered to docs/benchmarks.md.

`python -m benchmarks.report` renders every committed result, those of bench_decoding by decoding_report.py; `--check`
fails where the pages are not what they say. The fields of a result: README.md.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.machine import COMPARED

FORMAT = 1
ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/benchmarks.md")
LEFT_OUT = "Left out, too large or for lack of time"
SPEEDS = {"GB/s": "gb_per_s", "GFLOP/s": "gflop_per_s"}
SHARES = {"of copy": "of_copy", "of read": "of_read", "of limit": "of_limit"}
LISTS_OF_ROWS = ("prompts", "rows", "sweep", "steps", "profile", "agreement", "runs")  # bench_decoding has all of them
WORDS = {True: ("       met", "green"), False: ("   NOT met", "bold red"), None: ("not tested", "yellow")}
HEADER = """# Benchmarks

Written by `python -m benchmarks.report` from the files in `benchmarks/results/`; do not edit. How they are measured,
and what is and is not counted: [benchmarks/README.md](../benchmarks/README.md).

Microseconds per call, median (10th–90th percentile). *gain*: the fastest other way that does the same job ÷ ours. Ways
in italics do not do the same job and are there for comparison. *GB/s* counts the fewest bytes that ours must move;
*of copy* is that over the bandwidth of a large copy in the same run, *of read* over that of reading a large buffer.
"""


def save(result: dict[str, Any], path: Path) -> None:
    """Writes one result, a row per line so that a diff can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lists = [key for key in LISTS_OF_ROWS if result.get(key)]
    others = {key: value for key, value in result.items() if key not in lists}
    text = json.dumps(others, indent=1, ensure_ascii=False).removesuffix("\n}")
    for key in lists:
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in result[key])
        text += f',\n "{key}": [\n  {rows}\n ]'
    path.write_text(f"{text}\n}}\n")


def lines_of(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The rows of a result grouped into lines of the table: same labels, way and cache."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        key = json.dumps([row["labels"], row["how"], row["cache"]])
        lines.setdefault(key, []).append(row)
    return list(lines.values())


def gain(line: list[dict[str, Any]]) -> float | None:
    """How many times our median the fastest other way takes that does the same job; None if there is none."""
    others = [row["times_ours"] for row in line[1:] if row["same_job"] and row["median_us"] is not None]
    return min(others, default=None)


def noise(line: list[dict[str, Any]]) -> float:
    """The largest relative disagreement between halves of the samples on a line: a smaller difference says nothing."""
    return max((row["half_split"] for row in line if row["median_us"] is not None), default=0.0)


def contender_names(result: dict[str, Any]) -> list[str]:
    """All contenders in order of appearance, those that do another job last."""
    names = {row["contender"]: row["same_job"] for row in result["rows"]}
    return sorted(names, key=lambda name: not names[name])


def why_absent(result: dict[str, Any]) -> list[str]:
    """Who has no number, on how many lines, and why: a sentence per contender and reason."""
    lines: dict[tuple[str, str], int] = {}
    for row in result["rows"]:
        if "reason" in row:
            key = (row["contender"], row["reason"])
            lines[key] = lines.get(key, 0) + 1
    return [f"Not timed: {name}, on {_lines(count)}: {reason}." for (name, reason), count in lines.items()]


def _lines(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'}"


def show(result: dict[str, Any], console: Console) -> None:
    """The result as a table with the fastest way of each line in green, then the aims."""
    names = contender_names(result)
    labels = list(result["rows"][0]["labels"])
    table = Table(title=f"{_describe(result)}, µs per call", title_justify="left")
    table.add_column(", ".join(labels))
    table.add_column("cache")
    for column in [*names, *_gain_heads(result)]:
        table.add_column(column, justify="right")
    for line in lines_of(result):
        by_name = {row["contender"]: row for row in line}
        racing = [row["median_us"] for row in line if row["same_job"] and row["median_us"] is not None]
        cells: list[str | Text] = [", ".join(str(line[0]["labels"][label]) for label in labels), _cache(line[0])]
        for name in names:
            row = by_name.get(name)
            style = "green" if row and row["median_us"] in racing and row["median_us"] == min(racing) else ""
            cells.append(Text(_number(row and row["median_us"]), style if row and row["same_job"] else "dim"))
        table.add_row(*cells, *_gain_cells(line, result))
    console.print(table)
    for sentence in why_absent(result):
        console.print(sentence)
    for aim in result["aims"]:
        console.print(Text.assemble(WORDS[aim["met"]], f"  {aim['aim']}: {aim['measured']}"))


def render(result: dict[str, Any]) -> str:
    """The result as a section of Markdown."""
    names = contender_names(result)
    same_job = {row["contender"]: row["same_job"] for row in result["rows"]}
    labels = list(result["rows"][0]["labels"])
    heads = [*labels, "cache", *(name if same_job[name] else f"*{name}*" for name in names), *_gain_heads(result)]
    left = len(labels) + 1
    out = [f"## {_describe(result)}", "", _provenance(result), ""]
    out += [_markdown_row(heads), _markdown_row(["---"] * left + ["---:"] * (len(heads) - left))]
    for line in lines_of(result):
        by_name = {row["contender"]: row for row in line}
        cells = [*(str(line[0]["labels"][label]) for label in labels), _cache(line[0])]
        cells += [_with_spread(by_name.get(name)) for name in names]
        out.append(_markdown_row([*cells, *_gain_cells(line, result)]))
    if result.get("left_out"):
        out += ["", f"{LEFT_OUT}: {'; '.join(result['left_out'])}."]
    out += [line for sentence in why_absent(result) for line in ("", sentence)]
    if result["aims"]:
        out += ["", "| aim | | measured |", "| --- | --- | --- |"]
        words = {True: "met", False: "**not met**", None: "not tested"}
        out += [_markdown_row([aim["aim"], words[aim["met"]], aim["measured"]]) for aim in result["aims"]]
    return "\n".join([*out, ""])


def render_page(paths: Iterable[Path]) -> str:
    """The whole page, from result files; quick runs are no results."""
    results = [json.loads(path.read_text()) for path in sorted(paths)]
    return "\n".join([HEADER, *(render(result) for result in results if not result["quick"])])


def _describe(result: dict[str, Any]) -> str:
    device = result["machine"]["gpu"]["name"] if result["device"] == "cuda" else result["machine"]["cpu"]["model"]
    return f"{result['bench']}, {result['settings']['dtype']}, {device}"


def _provenance(result: dict[str, Any]) -> str:
    cpu, gpu, versions = result["machine"]["cpu"], result["machine"]["gpu"], result["versions"]
    kernels = result["machine"]["kernels"]
    others = "".join(f", {name} {versions[name]}" for name in COMPARED if name in versions)
    if result["device"] == "cuda":
        device = f"{gpu['name']}, driver {gpu['driver']}, CUDA {versions['cuda']}"
    else:
        device = f"{cpu['cores']} cores, {cpu['torch_threads']} threads used, {kernels['cpu_isa']}"
    return (
        f"{result['date'][:10]}, commit {result['commit']}; {device}; "
        f"torch {versions['torch']}, Python {versions['python']}{others}; "
        f"a large copy moves {result['copy_gb_per_s']:.4g} GB/s (read + written)"
        + (f", a large read {result['read_gb_per_s']:.4g} GB/s" if _is_held_against_reading(result) else "")
        + "".join(
            f", a large product in {dtype} computes {rate:.4g} GFLOP/s"
            for dtype, rate in result.get("matmul_gflop_per_s", {}).items()
        )
        + "."
    )


def _is_held_against_reading(result: dict[str, Any]) -> bool:
    return any("of_read" in row for row in result["rows"])


def _is_held_against_the_limit(result: dict[str, Any]) -> bool:
    return any("of_limit" in row for row in result["rows"])


def _gain_heads(result: dict[str, Any]) -> list[str]:
    heads = ["gain", "GB/s", "of copy", *(["of read"] if _is_held_against_reading(result) else [])]
    return [*heads, *(["GFLOP/s", "of limit"] if _is_held_against_the_limit(result) else [])]


def _gain_cells(line: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    ours, times = line[0], gain(line)
    cells = {"gain": "–" if times is None else f"{times:.2f} ×"} if ours["median_us"] is not None else {}
    cells |= {head: f"{ours[key]:.3g}" for head, key in SPEEDS.items() if key in ours}
    cells |= {head: f"{ours[key]:.0%}" for head, key in SHARES.items() if key in ours}
    return [cells.get(head, "–") for head in _gain_heads(result)]


def _cache(row: dict[str, Any]) -> str:
    return row["cache"] if row["how"] == "call" else f"{row['cache']}, {row['how']}"


def _with_spread(row: dict[str, Any] | None) -> str:
    if row is None or row["median_us"] is None:
        return "–"
    return f"{_number(row['median_us'])} ({_number(row['p10_us'])}–{_number(row['p90_us'])})"


def _number(value: float | None) -> str:
    """Three digits, without exponents: 0.0123, 1.23, 12.3, 1234."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Entry point of `python -m benchmarks.report`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="print these as Markdown and write nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    if options.results:
        print("\n".join(render(json.loads(path.read_text())) for path in options.results))
        return 0
    from benchmarks import decoding_report  # it has a page of its own, and calls this module

    paths = options.root.glob("benchmarks/results/*/bench_*.json")
    page, text = options.root / PAGE, render_page(p for p in paths if not p.name.startswith(decoding_report.NAME))
    if not options.check:
        page.parent.mkdir(exist_ok=True)
        page.write_text(text)
        decoding_report.write(options.root)
        return 0
    wrong = decoding_report.check(options.root)
    if not page.exists() or page.read_text() != text:
        wrong.insert(0, f"{PAGE} is not what benchmarks/results/ says")
    for sentence in wrong:
        print(f"{sentence}: run python -m benchmarks.report", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

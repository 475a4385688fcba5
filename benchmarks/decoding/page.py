"""Shows results of whole texts: tables on the screen, decoding.md beside the results, and a picture of the speed-ups.

`python -m benchmarks.pages` writes page and picture, `--check` compares them with the results. The picture holds its numbers,
so a check does not need to draw it.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.decoding.contenders import HF, JOINED, NGRAM, ONE_PASS, PLAIN, TWO_PASS
from benchmarks.decoding.drafts_page import draft_sections
from benchmarks.decoding.summary import ALL
from benchmarks.decoding.tables import Section, number, optional, speed_up
from benchmarks.harness import markdown, picture, template
from benchmarks.harness.cases import Row
from benchmarks.harness.results import LEFT_OUT, device_name, device_words, show_aims

NAME = "decoding"
PAGE = f"{NAME}.md"


def sections(result: dict[str, Any]) -> list[Section]:
    """The tables of a result, without its aims."""
    shown = [_race(result, setting, looping) for setting, looping in _sets(result)]
    if result.get("beside"):
        shown.append(_beside(result["beside"]))
    shown += draft_sections(result)
    shown += [_sweep(result["sweep"]), _profile(result["profile"]), _steps(result["steps"])]
    shown += [_agreement(result["agreement"]), _prompts(result["prompts"])]
    return [section for section in shown if section.rows]


def _sets(result: dict[str, Any]) -> list[tuple[str, bool]]:
    return list(dict.fromkeys((row["setting"], row["looping"]) for row in result["rows"]))


def _race(result: dict[str, Any], setting: str, looping: bool) -> Section:
    rows = [row for row in result["rows"] if (row["setting"], row["looping"]) == (setting, looping)]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    total = ALL if ALL in domains else domains[0]
    others = [domain for domain in domains if domain != total]
    cells = {(row["contender"], row["domain"]): row for row in rows}
    counts = ", ".join(f"{cells[PLAIN, domain]['prompts']} {domain}" for domain in others or domains)
    heads = ["", "tokens/s", "tokens per call", "acceptance length", "speed-up", *others, "slowest prompt", "same text"]
    table = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        row = cells[name, total]
        table.append(
            [
                name,
                number(row["tokens_per_second"]),
                f"{row['tokens_per_call']:.2f}",
                optional(row["mean_acceptance_length"]),
                speed_up(row),
                *(f"{cells[name, d]['speed_up']:.2f}" if (name, d) in cells else "–" for d in others),
                f"{row['slowest_prompt']:.2f}",
                f"{row['equal_texts']} of {row['prompts']}",
            ]
        )
    kind = "texts that loop" if looping else "texts that do not loop"
    words = f"Prompts: {counts}."
    if not setting.startswith("greedy"):
        words += " transformers draws other random numbers, so its texts differ."
    return Section(f"{setting[0].upper()}{setting[1:]}, {kind}", words, heads, table)


def _beside(rows: Sequence[Row]) -> Section:
    table = []
    for row in rows:
        if "reason" in row:
            table.append([row["contender"], "–", "–", "–", row["reason"]])
            continue
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        table.append(
            [
                row["contender"],
                f"{row['ms_per_token']:.1f}",
                f"{row['plain_ms_per_token']:.1f}",
                f"{row['equal_texts']} of {row['prompts']}",
                f"{versions}; cores of its process: {row.get('cores', 1)}",
            ]
        )
    words = "Greedy, a batch of one, on some of the prompts above. Another process, not in turn with the others."
    return Section("In another process", words, ["", "ms per token", "Plain, ms per token", "same text", ""], table)


def _sweep(rows: Sequence[Row]) -> Section:
    table = [
        [
            row["contender"],
            str(row.get("planned_rows", 1)),
            optional(row.get("planned_tokens_per_call")),
            f"{row['tokens_per_call']:.2f}",
            optional(row["mean_acceptance_length"]),
            f"{row['ms_per_token']:.1f}",
            optional(row.get("planned_speed_up")),
            speed_up(row),
        ]
        for row in rows
    ]
    count = rows[0]["prompts"] if rows else 0
    words = (
        f"Greedy, on {count} of the prompts above whose texts do not loop. L: look-ahead slots; the planner chooses the rows. "
        "*planned*: the planner's expectation from calibrated hit rates and, for the speed-up, measured step times."
    )
    heads = [
        "",
        "rows of a full step",
        "planned tokens per call",
        "tokens per call",
        "acceptance length",
        "ms per token",
        "planned speed-up",
        "speed-up",
    ]
    return Section("Look-ahead depth, passes and rows", words, heads, table)


def _profile(rows: Sequence[Row]) -> Section:
    parts = ("verify", "draft", "accept", "commit", "rest")
    table = [
        [row["contender"], f"{row['tokens_per_call']:.2f}", *(f"{row[f'{part}_ms']:.2f}" for part in parts)]
        for row in rows
    ]
    words = "Milliseconds per call of the model, by the profiler ranges of the loop; *verify* is the model's call."
    return Section("Where a step's time goes", words, ["", "tokens per call", *parts], table)


def _steps(rows: Sequence[Row]) -> Section:
    table = [
        [
            f"{row['rows']}",
            f"{row['ms']:.1f} ({row['ms_p10']:.1f}–{row['ms_p90']:.1f})",
            f"{row['ms'] / rows[0]['ms']:.2f}",
        ]
        for row in rows
    ]
    return Section(
        "A call of the model by its rows",
        "Median (10th–90th percentile).",
        ["rows", "ms", "× one row"],
        table,
    )


def _agreement(rows: Sequence[Row]) -> Section:
    table = [[row["contender"], f"{row['equal_texts']} of {row['texts']}", str(row["tokens"])] for row in rows]
    words = "Texts equal to transformers' greedy `generate` to the last token, in float32."
    return Section("Equality", words, ["", "equal texts", "tokens"], table)


def _prompts(rows: Sequence[Row]) -> Section:
    table = []
    for setting, domain in dict.fromkeys((row["setting"], row["domain"]) for row in rows):
        some = [row for row in rows if (row["setting"], row["domain"]) == (setting, domain)]
        raced = [row for row in some if row["raced"]]
        lengths = sorted(row["tokens"] for row in raced)
        table.append(
            [
                setting,
                domain,
                str(len(some)),
                f"{sum(row['looping'] for row in some)}",
                str(len(raced)),
                f"{lengths[0]}–{lengths[-1]}" if lengths else "–",
            ]
        )
    heads = ["", "domain", "continued", "looping", "raced", "tokens of raced texts"]
    return Section(
        "Prompts", "Plain continued each prompt first; its text decided whether the prompt was raced.", heads, table
    )


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the tables and the aims."""
    for section in sections(result):
        table = Table(title=section.title, title_justify="left")
        for place, head in enumerate(section.heads):
            table.add_column(head, justify="right" if place else "left")
        for row in section.rows:
            table.add_row(*(Text(cell.replace("**", "")) for cell in row))
        console.print(table)
    show_aims(result, console)
    if result["left_out"]:
        console.print(f"{LEFT_OUT}: {'; '.join(result['left_out'])}")


def render_page(results: Sequence[tuple[Path, dict[str, Any]]]) -> str:
    """The page of a folder's results."""
    out: list[str] = []
    for path, result in results:
        out += [f"## {_describe(result)}", "", _provenance(result), ""]
        if shows(result):
            out += [f"![speed-up by method and kind of text]({picture_of(path).name})", ""]
        out += markdown.aims(result)
        for section in sections(result):
            out += ["", f"### {section.title}", "", section.words, "", *markdown.table(section.heads, section.rows)]
        out += ["", f"Loops: {result['settings']['looping']}.", ""]
        if result["left_out"]:
            out += [f"Left out for lack of time: {'; '.join(result['left_out'])}.", ""]
    return template.page(__file__, {}, results=out or ["Nothing has been measured yet.", ""])


def _describe(result: dict[str, Any]) -> str:
    return f"{result['model']['name']}, {result['settings']['dtype']}, {device_name(result)}"


def _provenance(result: dict[str, Any]) -> str:
    versions, settings = result["versions"], result["settings"]
    device = device_words(result, settings["threads"])
    load = result["load_average"]
    return (
        f"{result['date'][:10]}, commit {result['commit']}; {device}; torch {versions['torch']}, transformers "
        f"{versions['transformers']}, Python {versions['python']}; {result['model']['slots']} look-ahead slots; texts of up to "
        f"{settings['tokens']} tokens; load average {load['before']:.1f} before, {load['after']:.1f} after."
    )


# ---- the picture ----

COLOURS = {NGRAM: "#b8b8b8", TWO_PASS: "#7fa6d6", ONE_PASS: "#1f5fa8", JOINED: "#0b2f5c", HF: "#d9b38c"}
OTHERS = ("#c98f5a", "#a0672f", "#7a4a1c")


def shows(result: dict[str, Any]) -> bool:
    """True if the result has speed-ups to draw."""
    return bool(story_of(result)["speed_ups"])


def story_of(result: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the picture: greedy, texts that do not loop, by domain and contender."""
    rows = [row for row in result["rows"] if row["setting"] == "greedy" and not row["looping"]]
    return {
        "title": _describe(result),
        "speed_ups": [
            [row["domain"], row["contender"], *(round(row[f"speed_up{end}"], 3) for end in ("", "_p10", "_p90"))]
            for row in rows
            if row["contender"] != PLAIN
        ],
    }


def picture_of(path: Path) -> Path:
    """The path of a result's picture, beside it."""
    return path.with_suffix(".svg")


def draw(story: dict[str, Any], path: Path) -> None:
    """Draws the picture; `path` ends in .svg or .png."""
    picture.save(path, partial(_figure, story), title="speed-up", story=story, dpi=110)


def _figure(story: dict[str, Any]) -> Any:
    """A bar chart: a group per domain, a bar per contender, the spread as a line."""
    from matplotlib import pyplot

    domains = list(dict.fromkeys(entry[0] for entry in story["speed_ups"]))
    names = list(dict.fromkeys(entry[1] for entry in story["speed_ups"]))
    unnamed = iter(OTHERS)
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    width = 0.84 / len(names)
    for place, name in enumerate(names):
        bars = {d: (mean, low, high) for d, contender, mean, low, high in story["speed_ups"] if contender == name}
        at = [domains.index(domain) + (place - (len(names) - 1) / 2) * width for domain in bars]
        means = [mean for mean, _, _ in bars.values()]
        errors = [
            [max(mean - low, 0) for mean, low, _ in bars.values()],
            [max(high - mean, 0) for mean, _, high in bars.values()],
        ]
        colour = COLOURS.get(name) or next(unnamed, "#555555")
        axes.bar(at, means, width * 0.92, color=colour, label=name, yerr=errors, ecolor="#333333", error_kw={"lw": 0.8})
        for x, mean, high in zip(at, means, (high for _, _, high in bars.values()), strict=True):
            axes.annotate(
                f"{mean:.2f}", (x, max(mean, high)), (0, 2), textcoords="offset points", ha="center", size=6.5
            )
    axes.axhline(1, color="#333333", lw=0.8)
    axes.annotate("Plain", (-0.5, 1), (1, 2), textcoords="offset points", size=7)
    axes.set_xlim(-0.5, len(domains) - 0.5)
    axes.set_xticks(range(len(domains)), domains)
    axes.set_ylabel("speed-up over Plain")
    axes.set_title(f"{story['title']}\ngreedy, texts that do not loop", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure


# ---- pages and pictures together ----


def committed(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Every committed result with its path; quick runs are left out."""
    paths = sorted(root.glob(f"benchmarks/results/*/{NAME}*.json"))
    results = [(path, json.loads(path.read_text())) for path in paths]
    return [(path, result) for path, result in results if not result["quick"]]


def pages(root: Path) -> dict[Path, str]:
    """Path -> text of the page, for each folder with results or with an older page."""
    results = committed(root)
    older = root.glob(f"benchmarks/results/*/{PAGE}")
    folders = dict.fromkeys([*(path.parent for path, _ in results), *(page.parent for page in older)])
    return {folder / PAGE: render_page([entry for entry in results if entry[0].parent == folder]) for folder in folders}


def write(root: Path) -> None:
    """Writes pages and pictures, and deletes pictures without a result."""
    for page, text in pages(root).items():
        page.write_text(text)
    drawn = {picture_of(path): result for path, result in committed(root) if shows(result)}
    for stale in set(root.glob(f"benchmarks/results/*/{NAME}*.svg")) - set(drawn):
        stale.unlink()
    for path, result in drawn.items():
        draw(story_of(result), path)


def check(root: Path) -> list[str]:
    """A sentence for each page or picture that does not show its result."""
    wrong = [
        f"{page.relative_to(root)} does not show the {NAME}*.json beside it"
        for page, text in pages(root).items()
        if not page.exists() or page.read_text() != text
    ]
    for path, result in committed(root):
        story, drawn = story_of(result), picture_of(path)
        if shows(result) and not (picture.tells(drawn, story) and picture.is_redrawn(drawn, partial(draw, story))):
            wrong.append(f"{drawn.relative_to(root)} does not show {path.relative_to(root)}")
    return wrong

"""The page of grammar results: valid texts, equal texts, calls per text, seconds, and the cost of the masks."""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from benchmarks.harness import markdown
from benchmarks.harness.template import page, words_of

PLAIN = "Plain"
ROUNDED = """
In bfloat16 a model's logits depend on the rows of a call, so two nearly tied tokens may change places between methods;
`--dtype float32` measures the same almost without that.
"""


def render(result: dict[str, Any]) -> str:
    """The page."""
    settings, rows, lines = result["settings"], result["rows"], []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        for library in dict.fromkeys(row["library"] for row in rows):
            part = [row for row in rows if row["temperature"] == temperature and row["library"] == library]
            title = "greedy" if temperature == 0 else f"temperature {temperature}"
            lines += [f"## {library}, {title}", "", *_methods(part), ""]
    return page(
        __file__, result, versions=words_of(settings["versions"]), tables=lines, tasks=_tasks(rows),
        rounded=ROUNDED if settings["dtype"] == "bfloat16" else "",
    )  # fmt: skip


def _methods(rows: Sequence[dict[str, Any]]) -> list[str]:
    plain = {row["prompt"]: row for row in rows if row["method"] == PLAIN}
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        runs = [row for row in rows if row["method"] == name]
        gains = sorted(plain[row["prompt"]]["seconds"] / row["seconds"] for row in runs)
        calls = sum(row["calls"] for row in runs)
        lines.append(
            [
                name,
                f"{sum(row['valid'] for row in runs)} of {len(runs)}",
                f"{sum(row['tokens'] == plain[row['prompt']]['tokens'] for row in runs)} of {len(runs)}",
                f"{mean(len(row['tokens']) for row in runs):.1f}",
                f"{mean(row['calls'] for row in runs):.1f}",
                f"{median(gains):.2f} ({gains[len(gains) // 10]:.2f}–{gains[-1 - len(gains) // 10]:.2f})",
                f"{1000 * sum(row['grammar_seconds'] for row in runs) / calls:.2f}",
                f"{sum(row['masks'] for row in runs) / calls:.1f}",
            ]
        )
    heads = ["", "valid", "same", "tokens", "calls", "against Plain", "grammar, ms per call", "masks per call"]
    return markdown.table(heads, lines)


def _tasks(rows: Sequence[dict[str, Any]]) -> list[str]:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for library in dict.fromkeys(row["library"] for row in rows):
        for task in dict.fromkeys(row["task"] for row in rows):
            runs = [row for row in rows if row["task"] == task and row["library"] == library]
            cells = [mean(row["calls"] for row in runs if row["method"] == name) for name in methods]
            lines.append([library, task, *(f"{cell:.1f}" for cell in cells)])
    return markdown.table(["library", "task", *methods], lines, left=2)

"""The page of serving results: tokens per second and time per token of each contender, beside plain serving."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.harness import markdown
from benchmarks.harness.template import page, words_of

PLAIN, NGRAM = "plain", "n-grams of vLLM"
ALWAYS, MEASURED = "PaSS, every step", "PaSS, measured length"


def render(result: dict[str, Any]) -> str:
    """The page."""
    settings, lines = result["settings"], []
    for concurrency in dict.fromkeys(row["concurrency"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["concurrency"] == concurrency]
        lines += [f"## {concurrency} at a time", "", *_table(rows), ""]
    return page(
        __file__, result, versions=words_of(settings["versions"]), mode="compiled" if settings["compiled"] else "eager",
        most=2 * settings["drafts"], tables=lines,
    )  # fmt: skip


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    plain = {row["round"]: row["tokens_per_second"] for row in rows if row["contender"] == PLAIN}
    lines = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        runs = [row for row in rows if row["contender"] == name]
        drafts, accepted = sum(r["num_drafts"] for r in runs), sum(r["num_accepted_tokens"] for r in runs)
        lines.append(
            [
                name,
                _spread([row["tokens_per_second"] for row in runs], 1),
                f"{median(row['median_ms_per_token'] for row in runs):.1f}",
                f"{median(row['mean_ms_to_first_token'] for row in runs):.0f}",
                _spread([row["tokens_per_second"] / plain[row["round"]] for row in runs], 2),
                f"{accepted / drafts:.2f}" if drafts else "–",
            ]
        )
    return markdown.table(["", "tokens/s", "ms per token", "ms to the first", "against plain", "accepted"], lines)


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"

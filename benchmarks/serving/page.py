"""The page of serving results: tokens per second and time per token of each contender, beside plain serving."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.harness import markdown

PLAIN, NGRAM = "plain", "n-grams of vLLM"
ALWAYS, MEASURED = "PaSS, every step", "PaSS, measured length"
HEADER = """# Serving with vLLM on a CPU

Written by `python -m benchmarks.serving` from `serving.json` beside this page; do not edit. vLLM's own benchmark client sends
held-out prompts (chat, code and prose by turns), greedy; all servers run side by side and take turns.

*tokens/s*: of all requests together, the median of the rounds; in brackets the lowest and highest. *ms per token*: of one
request, after its first token. *against plain*: tokens/s over those of plain serving in the same round, the median; in
brackets the lowest and highest. *accepted*: guesses accepted per draft, by vLLM's counters.
"""
FOOTER = """
A small model on few cores is the hardest place for speculation: a call with more rows costs more time, because the cores are
busy with few rows already, and requests in a batch share what is left. On a GPU a call with a few more rows takes about the
same time until the batch fills the machine; no GPU has run this.
"""


def render(result: dict[str, Any]) -> str:
    """The page."""
    settings, machine = result["settings"], result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    mode = "compiled" if settings["compiled"] else "eager"
    lines = [
        HEADER,
        f"Measured {result['date']} at commit {result['commit']}, on {machine['cpu']['model']}, "
        f"{machine['cpu']['cores']} cores; "
        f"{versions}; {settings['model']} in {settings['dtype']}, {mode}; {settings['length']} tokens per text; "
        f"{settings['rounds']} rounds; {PLAIN.capitalize()} and n-grams (4 drafts) without pass_ext; PaSS with "
        f"{settings['drafts']} drafts every step, and with up to {2 * settings['drafts']} of measured length.\n",
    ]
    for concurrency in dict.fromkeys(row["concurrency"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["concurrency"] == concurrency]
        lines += [f"## {concurrency} at a time", "", *_table(rows), ""]
    return "\n".join(lines) + FOOTER


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

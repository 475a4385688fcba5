"""The table of docs/guide/training.md: slots that are told uniform numbers beside slots that are not."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.markdown import table
from benchmarks.pages.injection.page import gains, origin, shares

NAME = "benchmarks.pages.injection.noise"
HEADS = (
    *("trained with transition scores", "told", "rate", "parameters", "loss", "judged with transition scores"),
    *("top 1", "gain of slots 1 and 2", "total variation", "its fall, slots 1 and 2"),
)


def render(result: dict[str, Any]) -> str:
    """The table, with what made it above."""
    lines = [line(row, scores) for row in result["rows"] for scores in row["judged"]]
    return "\n".join([origin(result), "", *table(HEADS, lines, left=3)])


def line(row: dict[str, Any], scores: str) -> list[str]:
    """A trial judged in a way."""
    judged = row["judged"][scores]
    return [
        "yes" if row["transitions"] else "no",
        *(("u", f"{row['rate']:g}") if row["rate"] else ("nothing", "")),
        f"{row['parameters']:,}",
        f"{row['loss']:.3f}",
        "yes" if scores == "with transitions" else "no",
        shares(judged["top 1"]),
        gains(judged, "top 1"),
        shares([1 - overlap for overlap in judged["overlap"]]),
        gains(judged, "overlap"),
    ]

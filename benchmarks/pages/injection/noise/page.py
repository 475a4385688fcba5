"""The table of docs/guide/training.md: slots that are told uniform numbers beside slots that are not, and how far such a number
tells the token.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness.markdown import table
from benchmarks.pages.injection.page import gains, origin, shares

NAME = "benchmarks.pages.injection.noise"
HEADS = (
    *("transition scores in training", "told", "when judged", "rate", "new parameters", "training loss"),
    *("top 1", "gain, slots 1 and 2", "overlap", "gain, slots 1 and 2"),
)
BOUND_HEADS = ("the slot before guesses", "draws the same token at the same u", "overlap with the model")


def render(result: dict[str, Any]) -> str:
    """The tables, and the run above them."""
    lines = [line(row, scores) for row in result["rows"] for scores in row["judged"]]
    u, guesses = result["u"], result["guesses"]
    bounds = [
        [scores, shares(guess["same draw"][:-1]), shares(guess["overlap"][:-1])] for scores, guess in guesses.items()
    ]
    return "\n".join([
        origin(result),
        "",
        *table(HEADS, lines, left=3),
        "",
        knowing(result["rows"]),
        "",
        "Slot 1 is told the u of a token whose law the row in front of it has. Slots 2, 3, … can know the law of the token "
        "before them as far as the slot before guesses it; with the shipped file, at the texts' temperature:",
        "",
        *table(BOUND_HEADS, bounds),
        "",
        f"The {u['numbers']:,} numbers u of the judged tokens have a mean of {u['mean']:.3f} and, in {u['bins']} bins, a "
        f"chi-square of {u['chi-square']:.1f} with {u['bins'] - 1} degrees of freedom.",
    ])  # fmt: skip


def line(row: dict[str, Any], scores: str) -> list[str]:
    """A trial judged in a way."""
    judged = row["judged"][scores]
    return [
        "with" if row["transitions"] else "without",
        "u" if row["rate"] else "nothing",
        scores.removesuffix(" transitions") if row["transitions"] else "without",
        f"{row['rate']:g}" if row["rate"] else "",
        f"{row['parameters']:,}",
        f"{row['loss']:.3f}",
        shares(judged["top 1"]),
        gains(judged, "top 1"),
        shares(judged["overlap"]),
        gains(judged, "overlap"),
    ]


def knowing(rows: list[dict[str, Any]]) -> str:
    """How much of the gain of transition scores, which know the token before, slots have that are told u instead."""
    found = {(row["transitions"], bool(row["rate"])): row["judged"] for row in rows}
    neither, told = (found[False, noise]["raw"]["top 1"] for noise in (False, True))
    known = found[True, False]["with transitions"]["top 1"]
    parts = [(got - less) / (most - less) for got, less, most in zip(told, neither, known, strict=True)]
    return (
        f"Transition scores know the token before and raise the share of right first candidates from {shares(neither)} to "
        f"{shares(known)}. Told u instead, slots reach {shares(told)}: by slot, "
        f"{', '.join(f'{100 * part:.0f}' for part in parts)} % of that gain."
    )

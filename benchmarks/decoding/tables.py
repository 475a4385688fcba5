"""``Section``: a table of decoding.md; and the formats of its cells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Section:
    """A table, its title, and the sentences above it."""

    title: str
    words: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def number(value: float) -> str:
    """A number with about three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def optional(value: float | None) -> str:
    """Two decimals; – for None."""
    return "–" if value is None else f"{value:.2f}"


def speed_up(row: dict[str, Any]) -> str:
    """A row's speed-up with its spread."""
    return f"**{row['speed_up']:.2f}** ({row['speed_up_p10']:.2f}–{row['speed_up_p90']:.2f})"

"""A table of decoding.md, and how its cells are written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Section:
    """A table with what is said above it."""

    title: str
    words: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def optional(value: float | None) -> str:
    """Two decimals, or that there is none."""
    return "–" if value is None else f"{value:.2f}"


def speed_up(row: dict[str, Any]) -> str:
    """With its spread."""
    return f"**{row['speed_up']:.2f}** ({row['speed_up_p10']:.2f}–{row['speed_up_p90']:.2f})"

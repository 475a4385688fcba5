"""Tables in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

VERDICTS = {True: "met", False: "**not met**", None: "not tested"}


def row(cells: Iterable[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def table(heads: Sequence[str], rows: Iterable[Iterable[str]], left: int = 1) -> list[str]:
    """A table, line by line: the first ``left`` columns aligned to the left, the others to the right."""
    alignment = ["---"] * left + ["---:"] * (len(heads) - left)
    return [row(heads), row(alignment), *map(row, rows)]


def aims(result: dict[str, Any]) -> list[str]:
    """The table of a result's aims: each with its verdict and what was measured."""
    rows = [[aim["aim"], VERDICTS[aim["met"]], aim["measured"]] for aim in result["aims"]]
    return table(["aim", "", "measured"], rows, left=3)

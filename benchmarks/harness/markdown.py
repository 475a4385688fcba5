"""Markdown: tables, and the part of a page that a program writes, between `<!-- NAME: … -->` and `<!-- /NAME -->`."""

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


# ---- parts of pages ----


def part_marks(name: str) -> tuple[str, str]:
    """The comments above and below the part of this name."""
    return f"<!-- {name}: written by the script, do not edit -->", f"<!-- /{name} -->"


def replace_part(page: str, name: str, text: str) -> str:
    """The page with ``text`` as its part of this name; a page without the two comments is a ``ValueError``."""
    above, below = part_marks(name)
    if page.count(above) != 1 or page.count(below) != 1 or page.index(below) < page.index(above):
        raise ValueError(
            f"markdown.replace_part: page must hold {above} and then {below}, once each, got other comments"
        )
    before, rest = page.split(above)
    return f"{before}{above}\n{text}\n{below}{rest.split(below)[1]}"


def has_part(page: str, name: str, text: str) -> bool:
    """True if ``text`` is the part of this name; False also for a page without the two comments."""
    above, below = part_marks(name)
    return page.count(f"{above}\n{text}\n{below}") == 1

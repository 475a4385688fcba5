"""The two tables of the demo: agreement of the texts, and speed of the methods. Both fit into 60 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pass_ext.decoding.stats import GenerationStats
from pass_ext.demo.agreement import Agreement
from pass_ext.demo.contenders import GREEDY, PLAIN, Run


def total(runs: Sequence[Run]) -> GenerationStats:
    """The statistics of all texts of one method."""
    return sum((run.stats for run in runs[1:]), start=runs[0].stats)


def agreement_table(agreements: Mapping[str, Sequence[Agreement]], prompts: Sequence[str]) -> Table:
    """A table with a row per method and a column per prompt."""
    table = _table("against Plain", *prompts)
    for name, row in agreements.items():
        table.add_row(name, *map(str, row))
    return _unbroken(table)


def speed_table(runs: Mapping[str, Sequence[Run]]) -> Table:
    """A table with a row per method."""
    totals = {name: total(texts) for name, texts in runs.items()}
    table = _table("method", "tokens/s", "tokens\nper call", "mean\nacceptance\nlength", "×\nPlain", "×\ngreedy")
    for column in table.columns[1:]:  # in a narrow window only the names of the methods wrap
        column.justify, column.no_wrap = "right", True
    for name, stats in totals.items():
        length = f"{stats.mean_acceptance_length:.2f}" if stats.num_drafts else "–"
        ratios = [stats.tokens_per_second / totals[base].tokens_per_second for base in (PLAIN, GREEDY)]
        table.add_row(
            name,
            f"{stats.tokens_per_second:.1f}",
            f"{stats.tokens_per_call:.2f}",
            length,
            *(f"{ratio:.2f}" for ratio in ratios),
        )
    return _unbroken(table)


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _unbroken(table: Table) -> Table:
    """The table with columns as wide as their longest word, so that lines break between words only."""
    for column in table.columns:
        column.min_width = max(len(word) for text in (column.header, *column.cells) for word in str(text).split())
    return table

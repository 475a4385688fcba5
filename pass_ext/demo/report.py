"""The tables: how the texts agree, and how fast each contender was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from pass_ext.decoding.stats import GenerationStats
from pass_ext.demo.agreement import Agreement
from pass_ext.demo.contenders import GREEDY, PLAIN, Run


def total(runs: Sequence[Run]) -> GenerationStats:
    """All texts of one contender."""
    return sum((run.stats for run in runs[1:]), start=runs[0].stats)


def agreement_table(agreements: Mapping[str, Sequence[Agreement]], prompts: Sequence[str]) -> Table:
    """A row per contender, a column per prompt."""
    table = Table("against Plain", *prompts)
    for name, row in agreements.items():
        table.add_row(name, *map(str, row))
    return table


def speed_table(runs: Mapping[str, Sequence[Run]]) -> Table:
    """A row per contender."""
    totals = {name: total(made) for name, made in runs.items()}
    table = Table()
    table.add_column("method")  # the one that may break its lines: a word that is cut off cannot be read
    for column in ("tokens/s", "tokens per call", "mean acceptance length", "× Plain", "× greedy"):
        table.add_column(column, justify="right", min_width=max(map(len, column.split())))
    for name, stats in totals.items():
        drafted = f"{stats.mean_acceptance_length:.2f}" if stats.num_drafts else "–"
        ratios = [stats.tokens_per_second / totals[base].tokens_per_second for base in (PLAIN, GREEDY)]
        table.add_row(
            name,
            f"{stats.tokens_per_second:.1f}",
            f"{stats.tokens_per_call:.2f}",
            drafted,
            *(f"{ratio:.2f}" for ratio in ratios),
        )
    return table

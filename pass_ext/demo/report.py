"""What the demo reports: agreement of the texts, speed of the methods, and a picture of both. The tables fit into 60 columns.

Two greedy texts must be equal, or first differ at a tie. In fp32 texts are equal. In bf16 the rounding of a call depends on its
number of rows. If two tokens' logits are almost equal, either token may win, and from there on the texts differ:

    tie: |logit(a) - logit(b)| <= TIE * 2 ^ (floor(log2 of the largest |logit|) - 7)      logits in fp32, by the same weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from pass_ext.decoding.stats import GenerationStats
from pass_ext.demo.contenders import GREEDY, PLAIN, Run

TIE = 8  # units in the last place of bf16: the rounding errors of all layers, and a margin
# Two shades per family, so that neighbouring calls differ.
_SHADES = {"transformers": ("#8c8c8c", "#c9c9c9"), "PaSS": ("#1b7f4b", "#7fd0a4")}
_OTHER = ("#1f5fa8", "#8fbbe8")


class Agreement(NamedTuple):
    """The length of the common beginning of two texts, and the tie after it."""

    same: int
    """The number of tokens before the first that differs."""
    gap: float | None
    """The difference of the two tokens' logits there; None if the texts are equal."""

    def __str__(self) -> str:
        if self.gap is None:
            return "same text"
        return f"tie at token {self.same} ({self.gap:.2f})"


def agreement(
    text: Sequence[int], other: Sequence[int], who: str, logits_after: Callable[[Sequence[int]], Tensor]
) -> Agreement:
    """The agreement of two texts; raises AssertionError if they differ without a tie.

    Args:
        text, other: new tokens, without the prompt.
        who: the method that wrote ``other``, for the message.
        logits_after: gives the fp32 logits ``[V]`` of the token that follows some new tokens.
    """
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    if same == len(text) == len(other):
        return Agreement(same, None)
    if same in (len(text), len(other)):
        raise AssertionError(f"{who} made {len(other)} tokens and Plain {len(text)}, the first {same} of them the same")
    logits = logits_after(text[:same])
    first, second = (logits[tokens[same]].item() for tokens in (text, other))
    gap, limit = abs(first - second), TIE * bf16_step(logits.abs().max().item())
    if not gap <= limit:
        raise AssertionError(
            f"{who} differs from Plain at token {same}: {other[same]} instead of {text[same]}, and that is no tie: "
            f"their logits are {second:.3f} and {first:.3f}, a tie is up to {limit:.3f}"
        )
    return Agreement(same, gap)


def bf16_step(size: float) -> float:
    """The distance of neighbouring bf16 numbers at this size."""
    return 2.0 ** (math.frexp(size)[1] - 8)  # size = mantissa * 2 ^ exponent, mantissa from 1/2 to 1


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


def draw(path: str | Path, runs: Mapping[str, Sequence[Run]], prompts: Sequence[str], title: str) -> None:
    """Writes the picture; raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(runs)
    high = 0.3 * len(names)
    figure = Figure(figsize=(11, (1 + len(prompts)) * (high + 0.55) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(prompts), 1)
    figure.suptitle(title, fontsize=11)
    _bars(axes[0], names, [total(runs[name]).tokens_per_second for name in names])
    for index, prompt in enumerate(prompts):
        _strips(axes[1 + index], {name: texts[index] for name, texts in runs.items()}, prompt)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, names: Sequence[str], speeds: Sequence[float]) -> None:
    axes.barh(names, speeds, color=[_shades(name)[0] for name in names], height=0.7)
    for row, speed in enumerate(speeds):
        axes.text(speed, row, f" {speed:.3g}", va="center", fontsize=9)
    axes.set_xlim(0, 1.07 * max(speeds))
    axes.set_xticks([])
    axes.set_title("tokens per second, all texts", fontsize=10, loc="left")
    _bare(axes)


def _strips(axes: Any, runs: Mapping[str, Run], prompt: str) -> None:
    """Draws a cell per token; the shade changes with each model call."""
    longest = max(len(run.tokens) for run in runs.values())
    for row, (name, run) in enumerate(runs.items()):
        first = 0
        for call, step in enumerate(run.steps):
            cells = [(first + i, 0.94) for i in range(step.tokens)]
            axes.broken_barh(cells, (row - 0.36, 0.72), color=_shades(name)[call % 2])
            first += step.tokens
        axes.text(longest + 0.4, row, f"{run.stats.model_calls} calls", va="center", fontsize=9)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set_xlim(0, longest * 1.07)
    axes.set_title(f"{prompt}: a cell per token, another shade per model call", fontsize=10, loc="left")
    _bare(axes)
    axes.set_xticks([])


def _bare(axes: Any) -> None:
    axes.invert_yaxis()
    axes.tick_params(labelsize=9, length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _shades(name: str) -> tuple[str, str]:
    return next((shades for family, shades in _SHADES.items() if name.startswith(family)), _OTHER)

"""The picture: tokens per second of each method, and the call that emitted each token of each text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pass_ext.demo.contenders import Run
from pass_ext.demo.report import total

# Two shades per family, so that neighbouring calls differ.
_SHADES = {"transformers": ("#8c8c8c", "#c9c9c9"), "PaSS": ("#1b7f4b", "#7fd0a4")}
_OTHER = ("#1f5fa8", "#8fbbe8")


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

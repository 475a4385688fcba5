"""The picture of the contenders: tokens per second, and below it the parts of our step beside the machine's limits."""

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import picture

OURS, OTHERS = "#1f5fa8", "#b8b8b8"
PARTS = ("#1f5fa8", "#d9b38c", "#a0672f")
LIMIT = "#b02020"


def draw(story: dict[str, Any], path: Path) -> None:
    """Draws the picture; `path` ends in .svg or .png."""
    picture.save(path, partial(_figure, story), title="contenders on a CPU", story=story, dpi=110)


def _figure(story: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    count, steps = len(story["speeds"]), len(story["parts"])
    figure, (above, below) = pyplot.subplots(
        2,
        1,
        figsize=(8, 1.6 + 0.24 * count + 0.42 * steps),
        height_ratios=(count + 2, 1.8 * steps + 2),
        layout="constrained",
    )
    _speeds(above, story)
    if steps:
        _parts(below, story)
    else:
        below.axis("off")
    return figure


def _speeds(axes: Any, story: dict[str, Any]) -> None:
    """A bar per contender, the range of its rounds as a line, and its tokens per call in words."""
    for place, (name, mean, low, high, per_call) in enumerate(story["speeds"]):
        colour = OURS if name in story["ours"] else OTHERS
        errors = [[max(mean - low, 0)], [max(high - mean, 0)]]
        axes.barh(place, mean, 0.7, color=colour, xerr=errors, ecolor="#333333", error_kw={"lw": 0.8})
        words = f"{mean:.1f}   ({per_call:.2f} tokens per call)"
        axes.annotate(words, (high, place), (5, 0), textcoords="offset points", va="center", size=7)
    axes.set_yticks(range(len(story["speeds"])), [entry[0] for entry in story["speeds"]], size=7.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(entry[3] for entry in story["speeds"]))
    axes.set_xlabel("tokens per second", size=8)
    axes.set_title(story["title"], fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _parts(axes: Any, story: dict[str, Any]) -> None:
    """A bar per contender made of the parts of its step; below it the machine's limit of the layers."""
    longest = max(sum(line["ms"].values()) for line in story["parts"])
    for place, line in enumerate(story["parts"]):
        left = limit = 0.0
        for part, colour in zip(line["ms"], PARTS, strict=True):
            milliseconds = max(line["ms"][part], 0.0)
            axes.barh(place, milliseconds, 0.5, left, color=colour, label=part if place == 0 else None)
            if milliseconds > 0.07 * longest:
                share = f", {line['limit_ms'][part] / milliseconds:.0%}" if part in line["limit_ms"] else ""
                middle = left + milliseconds / 2
                white = colour in (PARTS[0], PARTS[2])
                axes.text(middle, place, f"{milliseconds:.1f}{share}", ha="center", va="center", size=6.5,
                          color="white" if white else "#222222")  # fmt: skip
            left += milliseconds
            limit += line["limit_ms"].get(part, 0.0)
        label = "the machine's limit" if place == 0 else None
        axes.barh(place + 0.36, limit, 0.14, color=LIMIT, label=label)
    axes.set_yticks(
        range(len(story["parts"])),
        [f"{line['contender']}\n{line['rows']:.1f} rows" for line in story["parts"]],
        size=7.5,
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms per call of the model; percent: the limit ÷ the time", size=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.45, 1.0))

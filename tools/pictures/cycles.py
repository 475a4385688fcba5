"""The picture of docs/guide/pass.md: inputs and outputs of the model in both cycles of PaSS.

`python -m tools.pictures.cycles` writes docs/guide/pass-cycles.svg, which needs matplotlib. `--check` writes nothing and fails
if the picture differs.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import picture
from tools.command import run
from tools.pictures.parts import box, fault_of

PATH = Path("docs/guide/pass-cycles.svg")
TOKEN, SLOT, KEPT, DROPPED, INK, LINE = "#2f6fb3", "#e08a1e", "#3c8f4f", "#b9c0c8", "#3a424c", "#9aa5b1"

# Rows of a call: (input, output, fate of the output); the input of a slot is its number.
TWO_PASSES = [
    ("look ahead", [("fox", "jumps", "kept"), (1, "over", "draft"), (2, "the", "draft"), (3, "big", "draft")]),
    (
        "verify",
        [("jumps", "over", "kept"), ("over", "the", "kept"), ("the", "lazy", "kept"), ("big", "house", "dropped")],
    ),
]
ONE_PASS = [
    ("verify and look ahead", [
        ("jumps", "over", "kept"), ("over", "the", "kept"), ("the", "lazy", "kept"), ("big", "house", "dropped"),
        (1, "dog", "draft"), (2, ".", "draft"), (3, "It", "draft"),
    ]),
    ("verify and look ahead", [
        ("lazy", "dog", "kept"), ("dog", ".", "kept"), (".", "The", "kept"), ("It", "was", "dropped"),
        (1, "dog", "draft"), (2, "was", "draft"), (3, "not", "draft"),
    ]),
]  # fmt: skip
CYCLES = [("Two passes: 4 tokens from 2 calls", TWO_PASSES), ("One pass: 6 tokens from 2 calls", ONE_PASS)]
COLOURS = {"kept": KEPT, "draft": SLOT, "dropped": DROPPED}


def tokens_of(calls: list[Any]) -> int:
    """The number of tokens that the calls of a cycle produce."""
    return sum(fate == "kept" for _, rows in calls for _, _, fate in rows)


def draw(path: Path) -> None:
    """Draws the picture; `path` ends in .svg or .png."""
    picture.save(path, _figure, title="PaSS", story={"cycles": CYCLES})


def _figure() -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(9.6, 5.2), layout="constrained")
    for ax, (title, calls) in zip(axes, CYCLES, strict=True):
        _draw_cycle(ax, title, calls)
    _draw_legend(axes[0])
    return figure


def _draw_cycle(ax: Any, title: str, calls: list[Any]) -> None:
    ax.set_xlim(-0.6, 16.4)
    ax.set_ylim(-0.9, 4.2)
    ax.set_axis_off()
    ax.text(-0.4, 3.95, title, fontsize=12, weight="bold", color=INK, va="center")
    start = 1.2
    ax.text(-0.4, 2.5, "output", fontsize=9, color=INK, va="center")
    ax.text(-0.4, 0.0, "input", fontsize=9, color=INK, va="center")
    for name, rows in calls:
        width = len(rows)
        ax.add_patch(box(start - 0.1, 0.72, width, 1.06, "#eef0f3", LINE))
        ax.text(start + width / 2 - 0.1, 1.25, f"one call: {name}", fontsize=9, color=INK, ha="center", va="center")
        for place, (source, output, fate) in enumerate(rows):
            x = start + place
            is_slot = isinstance(source, int)
            for low, high in ((0.36, 0.7), (1.8, 2.14)):
                ax.annotate(
                    "", (x + 0.4, high), (x + 0.4, low), arrowprops={"arrowstyle": "->", "color": LINE, "lw": 1.1}
                )
            ax.add_patch(box(x, -0.34, 0.8, 0.68, SLOT if is_slot else TOKEN, "none"))
            ax.text(
                x + 0.4, 0.0, f"LA{source}" if is_slot else source, fontsize=9, color="white", ha="center", va="center"
            )
            ax.add_patch(box(x, 2.16, 0.8, 0.68, "white", COLOURS[fate]))
            colour = INK if fate != "dropped" else DROPPED
            ax.text(x + 0.4, 2.5, output, fontsize=9, color=colour, ha="center", va="center")
        start += width + 0.6


def _draw_legend(ax: Any) -> None:
    legend = [
        (KEPT, "a token of the text"),
        (SLOT, "a draft for the next call"),
        (DROPPED, "after a wrong draft"),
    ]
    for place, (colour, text) in enumerate(legend):
        ax.add_patch(box(6.6 + 3.3 * place, 3.78, 0.34, 0.34, "white", colour))
        ax.text(7.06 + 3.3 * place, 3.95, text, fontsize=9, color=INK, va="center")


def check(root: Path) -> str | None:
    """A sentence for a picture that is out of date; None if it is not."""
    return fault_of(root, PATH, "these cycles", {"cycles": CYCLES}, draw)


def main() -> int:
    """Entry point of `python -m tools.pictures.cycles`."""
    return run("pictures.cycles", __doc__, check, lambda root: draw(root / PATH))


if __name__ == "__main__":
    sys.exit(main())

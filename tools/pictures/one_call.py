"""The picture of README.md: one call of a model that verifies draft tokens and looks ahead, and the op of each part.

`python -m tools.pictures.one_call` writes docs/one-call.svg, which needs matplotlib. `--check` writes nothing and fails if
the picture differs.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import picture
from tools.command import run
from tools.pictures.parts import box, fault_of

PATH = Path("docs/one-call.svg")
TOKEN, SLOT, ACCEPTED, DROPPED = "#2f6fb3", "#e08a1e", "#3c8f4f", "#b9c0c8"
INK, LINE, PALE = "#3a424c", "#9aa5b1", "#eef0f3"

PREFIX = ["The", "quick", "brown"]
# Rows of the call: (input, output, fate of the output); the input of a slot is its number.
ROWS = [
    ("fox", "jumps", "accepted"), ("jumps", "over", "accepted"), ("over", "the", "accepted"), ("the", "lazy", "accepted"),
    ("big", "house", "dropped"), (1, "dog", "draft"), (2, ".", "draft"), (3, "It", "draft"),
]  # fmt: skip
OPS = [  # (op, its effect), from the input to the cache
    ("lookahead_embed", "embeds tokens and slots in one gather"),
    ("attention_tree", "every row sees the text and its own ancestors"),
    ("accept_tree", "keeps the draft tokens that the model confirms"),
    ("cache_commit_", "stores keys and values of accepted rows"),
]
COLOURS = {"accepted": ACCEPTED, "draft": SLOT, "dropped": DROPPED}
LEFT = 4.0  # left edge of the first row


def story() -> dict[str, Any]:
    """The data that the picture shows."""
    return {"prefix": PREFIX, "rows": ROWS, "ops": OPS}


def written() -> list[str]:
    """The tokens that the call adds to the text: every accepted output."""
    return [output for _, output, fate in ROWS if fate == "accepted"]


def draw(path: Path) -> None:
    """Draws the picture; `path` ends in .svg or .png."""
    picture.save(path, _figure, title="One call of the model", story=story())


def _figure() -> Any:
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(9.6, 4.1), layout="constrained")
    ax.set_axis_off()
    ax.set_xlim(-0.1, 18.4)
    ax.set_ylim(-1.75, 5.55)
    _draw_text(ax)
    _draw_rows(ax)
    _draw_ops(ax)
    return figure


def _draw_text(ax: Any) -> None:
    """The text so far, whose keys and values the model reads from the cache."""
    for place, word in enumerate(PREFIX):
        _label(ax, 0.2 + place * 1.05, -0.36, word, INK, face=PALE, edge=LINE)
        _arrow(ax, 0.65 + place * 1.05, 0.42, 0.86)
    ax.add_patch(box(0.1, 0.92, 3.2, 1.3, "white", LINE))
    ax.text(1.7, 1.57, "keys and values\nin the cache", fontsize=9, color=INK, ha="center", va="center")
    ax.annotate("", (LEFT - 0.15, 1.57), (3.32, 1.57), arrowprops={"arrowstyle": "->", "color": LINE, "lw": 1.1})
    ax.text(1.7, -0.78, "the text so far", fontsize=9, color=INK, ha="center", va="center")


def _draw_rows(ax: Any) -> None:
    """Inputs below, the model, outputs above; a bracket names each group."""
    width = len(ROWS) * 1.05
    ax.add_patch(box(LEFT - 0.12, 0.92, width + 0.1, 1.3, PALE, LINE))
    ax.text(LEFT + width / 2, 1.57, "one call of the model", fontsize=10, color=INK, ha="center", va="center")
    for place, (source, output, fate) in enumerate(ROWS):
        x, is_slot = LEFT + place * 1.05, isinstance(source, int)
        word = f"LA{source}" if is_slot else source
        _label(ax, x, -0.36, word, "white", face=SLOT if is_slot else TOKEN, edge="none")
        _arrow(ax, x + 0.45, 0.42, 0.86)
        _arrow(ax, x + 0.45, 2.28, 2.72)
        _label(ax, x, 2.78, output, DROPPED if fate == "dropped" else INK, face="white", edge=COLOURS[fate])
    fates = [fate for *_, fate in ROWS]
    accepted, drafts = fates.count("accepted"), fates.count("draft")
    slots = len(ROWS) - drafts
    for first, last, y, text in (
        (0, 1, -0.55, "last\ntoken"),
        (1, slots, -0.55, "draft tokens of the call before"),
        (slots, len(ROWS), -0.55, "look-ahead slots"),
        (0, accepted, 3.72, f"{accepted} tokens of the text"),
        (slots, len(ROWS), 3.72, "next draft tokens"),
    ):
        _bracket(ax, LEFT + first * 1.05, LEFT + last * 1.05 - 0.15, y, text)
    ax.text(LEFT + accepted * 1.05 + 0.45, 3.9, "dropped", fontsize=9, color=DROPPED, ha="center", va="center")
    ax.text(0.1, 5.25, f"One call, {accepted} tokens", fontsize=12, weight="bold", color=INK, va="center")


def _draw_ops(ax: Any) -> None:
    """Each op at the height of its part."""
    for y, (op, does) in zip((0.0, 1.57, 3.12, 4.35), OPS, strict=True):
        ax.text(12.75, y + 0.2, op, fontsize=9.5, family="DejaVu Sans Mono", weight="bold", color=TOKEN, va="center")
        ax.text(12.75, y - 0.24, does, fontsize=8.4, color=INK, va="center")


def _bracket(ax: Any, left: float, right: float, y: float, text: str) -> None:
    down = y < 0
    end = y + 0.12 if down else y - 0.12
    ax.plot([left, left, right, right], [end, y, y, end], color=LINE, linewidth=1.0)
    ax.text(
        (left + right) / 2, y - 0.14 if down else y + 0.14, text, fontsize=9, color=INK, ha="center",
        va="top" if down else "bottom",
    )  # fmt: skip


def _arrow(ax: Any, x: float, low: float, high: float) -> None:
    ax.annotate("", (x, high), (x, low), arrowprops={"arrowstyle": "->", "color": LINE, "lw": 1.1})


def _label(ax: Any, x: float, y: float, word: str, colour: str, *, face: str, edge: str) -> None:
    ax.add_patch(box(x, y, 0.9, 0.72, face, edge))
    ax.text(x + 0.45, y + 0.35, word, fontsize=8.5, color=colour, ha="center", va="center")


def check(root: Path) -> str | None:
    """A sentence for a picture that is out of date; None if it is not."""
    return fault_of(root, PATH, "this call", story(), draw)


def main() -> int:
    """Entry point of `python -m tools.pictures.one_call`."""
    return run("pictures.one_call", __doc__, check, lambda root: draw(root / PATH))


if __name__ == "__main__":
    sys.exit(main())

"""The picture of docs/guide/speculative.md: a tree of candidates drafted level by level, and the slices of its mask.

`python -m tools.pictures.levels` writes docs/guide/speculative-levels.svg, which needs matplotlib. `--check` writes nothing and
fails if the picture differs.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import picture
from pass_ext import Tree
from tools.command import run
from tools.pictures.parts import fault_of

PATH = Path("docs/guide/speculative-levels.svg")
TREE = Tree.from_branching((2, 2, 1))
WORDS = ["The", "dog", "cat", "runs", "is", "sat", "is", "home", "here", "down", "a"]
LEVELS = ["#2f6fb3", "#3c8f4f", "#e08a1e", "#8c5fb0"]  # colours of depths 0 to 3
INK, LINE, HIDDEN = "#3a424c", "#9aa5b1", "#f2f4f6"


def calls() -> list[tuple[str, int]]:
    """The calls of a step, each with the number of rows that it reads."""
    drafts = [(f"draft call {depth + 1}", len(TREE.slice(depth))) for depth in range(TREE.max_depth)]
    return [*drafts, ("target", len(TREE))]


def story() -> dict[str, Any]:
    """The data that the picture shows."""
    return {"parents": list(TREE.parents), "words": WORDS, "calls": calls()}


def draw(path: Path) -> None:
    """Draws the picture; `path` ends in .svg or .png."""
    picture.save(path, _figure, title="Drafting level by level", story=story())


def _figure() -> Any:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10.4, 4.8), layout="constrained", gridspec_kw={"width_ratios": [1.1, 1]}
    )
    _draw_tree(left)
    _draw_mask(right)
    return figure


def _places() -> list[tuple[float, float]]:
    """(x, y) of each node: leaves side by side, parents above the middle of their children."""
    across = {leaf: float(i) for i, leaf in enumerate(leaf for leaf in TREE.leaves)}
    for node in reversed(range(len(TREE))):
        below = TREE.children(node)
        across.setdefault(node, sum(across[child] for child in below) / max(len(below), 1))
    return [(2.1 * across[node], -1.5 * TREE.depths[node]) for node in range(len(TREE))]


def _draw_tree(ax: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    places, width, height = _places(), 1.5, 0.66
    ax.set_axis_off()
    ax.set_xlim(-1.1, 10.6)
    ax.set_ylim(-5.1, 0.9)
    for node, parent in enumerate(TREE.parents):
        if parent >= 0:
            (x, y), (above, top) = places[node], places[parent]
            ax.plot([above, x], [top, y], color=LINE, linewidth=1.3, zorder=1)
    for node, (x, y) in enumerate(places):
        style = "round,pad=0,rounding_size=0.14"
        box = FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle=style, facecolor=LEVELS[TREE.depths[node]],
            edgecolor="white", linewidth=1.2, zorder=2,
        )  # fmt: skip
        ax.add_patch(box)
        ax.text(x, y, f"{node} {WORDS[node]}", fontsize=9, color="white", ha="center", va="center", zorder=3)
    for depth in range(TREE.max_depth):
        y, rows = -1.5 * depth - 0.75, len(TREE.slice(depth))
        text = f"draft call {depth + 1}\nreads {rows} row{'s' if rows > 1 else ''}"
        ax.text(10.5, y, text, fontsize=9, color=INK, ha="right", va="center")
        ax.plot([-1.0, 10.5], [y - 0.34, y - 0.34], color=LINE, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
    ax.text(10.5, -4.98, f"target reads {len(TREE)} rows", fontsize=9, color=INK, ha="right", va="center")
    ax.text(-1.0, 0.7, "One call of the draft per level", fontsize=12, weight="bold", color=INK, va="center")


def _draw_mask(ax: Any) -> None:
    from matplotlib.patches import Rectangle

    size = len(TREE)
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.set_xlim(-0.9, size + 3.9)
    ax.set_ylim(size + 0.6, -2.0)
    for row in range(size):
        visible = TREE.path(row)
        for column in range(size):
            colour = LEVELS[TREE.depths[column]] if column in visible else HIDDEN
            ax.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, facecolor=colour, edgecolor="none"))
        ax.text(-0.25, row + 0.5, str(row), fontsize=8, color=INK, ha="right", va="center")
        ax.text(row + 0.5, -0.3, str(row), fontsize=8, color=INK, ha="center", va="center")
    for name, rows in calls():
        ax.add_patch(Rectangle((0, 0), rows, rows, facecolor="none", edgecolor=INK, linewidth=1.6))
        ax.text(
            rows + 0.2, rows - 0.45, f"{name}: {rows} × {rows}", fontsize=9, color=INK, ha="left", va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0}, zorder=4,
        )  # fmt: skip
    ax.text(-0.8, -1.5, "One mask; every call has its top left", fontsize=12, weight="bold", color=INK, va="center")


def check(root: Path) -> str | None:
    """A sentence for a picture that is out of date; None if it is not."""
    return fault_of(root, PATH, "this tree", story(), draw)


def main() -> int:
    """Entry point of `python -m tools.pictures.levels`."""
    return run("pictures.levels", __doc__, check, lambda root: draw(root / PATH))


if __name__ == "__main__":
    sys.exit(main())

"""The picture of ``Tree.draw``: the tree on the left, level by level, and its mask on the right, with a few columns for the
prefix, which every row sees. One unit is the side of a square of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NODE, SLOT, PREFIX, HIDDEN, EDGE, INK = "#2f6fb3", "#e08a1e", "#bcd3ea", "#eef0f3", "#9aa5b1", "#3a424c"
PREFIX_COLUMNS = 3
GAP = 2.0  # between tree, prefix and mask
MOST_LABELLED = 64  # rows; in larger trees numbers would not be legible


def draw_tree(parents: Sequence[int], slots: Sequence[int], ax: Axes | None = None) -> Axes:
    """Draws a tree on ``ax``, or on a new figure of suitable size.

    Args:
        parents: the parent of each row, -1 for the root; parents come before children.
        slots: the look-ahead slot of each row, -1 for a node.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("Tree.draw needs matplotlib: pip install 'pass_ext[bench]'") from error
    places = _places(parents)
    width = max(x for x, _ in places) + 0.5
    start = width + GAP + 1.0  # the prefix begins after the tree and the row numbers
    if ax is None:
        total = start + PREFIX_COLUMNS + 0.5 + len(parents)
        scale = min(0.32, 16 / total, 12 / (len(parents) + 2))
        _, ax = pyplot.subplots(figsize=(scale * (total + 2), scale * (len(parents) + 4)), layout="constrained")
    ax.set_xlim(-1.0, start + PREFIX_COLUMNS + 1.0 + len(parents))
    ax.set_ylim(len(parents) + 0.8, -2.4)  # row 0 on top
    ax.set_aspect("equal")
    ax.set_axis_off()
    _draw_nodes(parents, slots, places, ax)
    _draw_mask(parents, slots, start, ax)
    return ax


def _places(parents: Sequence[int]) -> list[tuple[float, float]]:
    """The position of each row: leaves side by side, parents above the middle of their children, levels as high as the mask."""
    below: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for row, parent in enumerate(parents[1:], 1):
        below[parent].append(row)
        depths[row] = depths[parent] + 1
    order, pending = [], [0]
    while pending:
        row = pending.pop()
        order.append(row)
        pending += reversed(below[row])
    leaves = [row for row in order if not below[row]]
    step = max(1.0, min(2.0, 0.8 * len(parents) / len(leaves)))
    across = {row: step * index + 0.5 for index, row in enumerate(leaves)}
    for row in reversed(order):
        if below[row]:
            across[row] = (across[below[row][0]] + across[below[row][-1]]) / 2
    room = (len(parents) - 1) / max(1, *depths)
    height = min(room, max(3.0, 0.7 * room))
    return [(across[row], 0.5 + height * depth) for row, depth in enumerate(depths)]


def _draw_nodes(parents: Sequence[int], slots: Sequence[int], places: list[tuple[float, float]], ax: Axes) -> None:
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Circle

    edges = [(places[parent], places[row]) for row, parent in enumerate(parents) if parent >= 0]
    ax.add_collection(LineCollection(edges, colors=EDGE, linewidths=1.2, zorder=1))
    circles = [Circle(place, 0.44) for place in places]
    colours = [NODE if slot < 0 else SLOT for slot in slots]
    ax.add_collection(PatchCollection(circles, facecolors=colours, edgecolors="white", linewidths=1.0, zorder=2))
    if len(parents) <= MOST_LABELLED:
        for row, (x, y) in enumerate(places):
            _write(ax, x, y, str(row), color="white", weight="bold")


def _draw_mask(parents: Sequence[int], slots: Sequence[int], start: float, ax: Axes) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    rows, first = len(parents), start + PREFIX_COLUMNS + 0.5
    seen: list[set[int]] = []
    for row, parent in enumerate(parents):
        seen.append({row} | (seen[parent] if parent >= 0 else set()))
    squares, colours = [], []
    for row in range(rows):
        for column in range(PREFIX_COLUMNS):
            squares.append(Rectangle((start + column, row), 0.92, 0.92))
            colours.append(PREFIX)
        for column in range(rows):
            squares.append(Rectangle((first + column, row), 0.92, 0.92))
            colours.append(HIDDEN if column not in seen[row] else NODE if slots[column] < 0 else SLOT)
    ax.add_collection(PatchCollection(squares, facecolors=colours, edgecolors="none"))
    _write(ax, start + PREFIX_COLUMNS / 2, -1.4, "prefix", color=INK)
    _write(ax, start + PREFIX_COLUMNS / 2, -0.5, "· · ·", color=INK)
    _write(ax, first + rows / 2, -1.4, "this step's rows", color=INK)
    if rows <= MOST_LABELLED:
        for row in range(rows):
            colour = INK if slots[row] < 0 else SLOT
            _write(ax, start - 0.7, row + 0.46, str(row), color=colour)
            _write(ax, first + row + 0.46, -0.5, str(row), color=colour)


def _write(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    # The text is about half a unit high, whatever the size of the picture.
    (left, top), (right, bottom) = ax.transData.transform([(0, 0), (1, 1)])
    unit = min(abs(right - left), abs(bottom - top)) * 72 / ax.figure.dpi
    ax.text(x, y, text, ha="center", va="center", fontsize=max(4.0, min(10.0, 0.55 * unit)), **style)

"""A rounded box for pictures, and the check of a committed picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import picture


def box(x: float, y: float, width: float, height: float, face: str, edge: str) -> Any:
    """A rounded box with its lower left corner at (x, y)."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.12"
    return FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, linewidth=1.6)


def fault_of(root: Path, path: Path, subject: str, story: dict[str, Any], draw: Callable[[Path], None]) -> str | None:
    """A sentence for a picture that does not show its subject or that this program did not draw; None if it is right."""
    if not picture.tells(root / path, story):
        return f"{path} does not show {subject}"
    if not picture.is_redrawn(root / path, draw):
        return f"{path} is not drawn by this script"
    return None

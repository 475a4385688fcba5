"""Pictures that can be checked: an SVG holds the data that it shows, its story, and the same matplotlib draws the same bytes.

Drawing needs matplotlib; checking a story does not.
"""

import html
import importlib.util
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

STYLE = {
    "svg.hashsalt": "pass_ext",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "savefig.facecolor": "white",
}


def save(path: Path, make: Callable[[], Any], *, title: str, story: dict[str, Any], dpi: int = 96) -> None:
    """Saves the figure that `make` returns. `path` ends in .svg, or in .png, which holds no story."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context("default"), pyplot.rc_context(STYLE):
        figure = make()
        if path.suffix == ".svg":
            description = json.dumps({**story, "matplotlib": matplotlib.__version__})
            figure.savefig(path, metadata={"Date": None, "Creator": None, "Title": title, "Description": description})
            path.write_text(re.sub(r"[ \t]+$", "", path.read_text(), flags=re.MULTILINE))
        else:
            figure.savefig(path, dpi=dpi)
        pyplot.close(figure)


def tells(path: Path, story: dict[str, Any]) -> bool:
    """True if the picture exists and holds this story."""
    held = _story(path)
    held.pop("matplotlib", None)
    return held == json.loads(json.dumps(story))


def is_redrawn(path: Path, draw: Callable[[Path], None]) -> bool:
    """True if drawing gives the same file. A picture drawn by another matplotlib than the installed one is not compared."""
    if _story(path).get("matplotlib") != _version_here():
        return True
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "picture.svg"
        draw(again)
        return again.read_text() == path.read_text()


def _story(path: Path) -> dict[str, Any]:
    svg = path.read_text() if path.exists() else ""
    found = re.search(r"<dc:description>(.*?)</dc:description>", svg, flags=re.DOTALL)
    story: dict[str, Any] = json.loads(html.unescape(found[1])) if found else {}
    return story


def _version_here() -> str | None:
    if importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    return str(matplotlib.__version__)

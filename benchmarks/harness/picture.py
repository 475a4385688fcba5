"""Pictures that can be checked: an SVG says what it shows, its story, and the same matplotlib draws it the same to the byte.

Needs matplotlib to draw, not to check a story.
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
    """The figure that `make` gives; `path` may end in .svg or .png, which tells no story."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context("default"), pyplot.rc_context(STYLE):
        figure = make()
        if path.suffix == ".svg":
            told = json.dumps({**story, "matplotlib": matplotlib.__version__})
            figure.savefig(path, metadata={"Date": None, "Creator": None, "Title": title, "Description": told})
            path.write_text(re.sub(r"[ \t]+$", "", path.read_text(), flags=re.MULTILINE))
        else:
            figure.savefig(path, dpi=dpi)
        pyplot.close(figure)


def tells(path: Path, story: dict[str, Any]) -> bool:
    """Whether there is a picture, and says that it shows this."""
    told = _told(path)
    told.pop("matplotlib", None)
    return told == json.loads(json.dumps(story))


def is_redrawn(path: Path, draw: Callable[[Path], None]) -> bool:
    """Whether drawing gives this very picture; taken for granted where another matplotlib drew it."""
    if _told(path).get("matplotlib") != _version_here():
        return True
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "picture.svg"
        draw(again)
        return again.read_text() == path.read_text()


def _told(path: Path) -> dict[str, Any]:
    svg = path.read_text() if path.exists() else ""
    found = re.search(r"<dc:description>(.*?)</dc:description>", svg, flags=re.DOTALL)
    told: dict[str, Any] = json.loads(html.unescape(found[1])) if found else {}
    return told


def _version_here() -> str | None:
    if importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    return str(matplotlib.__version__)

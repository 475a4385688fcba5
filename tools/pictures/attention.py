"""The pictures of docs/ops/attention.md: trees and their masks, drawn by `Tree.draw`.

`python -m tools.pictures.attention` writes docs/ops/attention-<name>.svg, which needs matplotlib. `--check` writes nothing and
fails if a picture does not show its tree. Redrawn with the same matplotlib, a picture must be equal to the byte.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import picture
from pass_ext import Tree
from tools.command import run

# name: (title, tree)
PICTURES = {
    "chain": ("A chain of four drafts", Tree.chain(4)),
    "tree": ("A tree: three drafts, and two below each", Tree.from_branching((3, 2))),
    "lookahead": ("Two drafts, and three look-ahead slots after every node", Tree.chain(2).with_lookahead(3)),
}


def path_of(name: str) -> Path:
    """The path of a picture from the repository's root."""
    return Path("docs/ops") / f"attention-{name}.svg"


def story_of(name: str) -> dict[str, Any]:
    """The data that a picture shows."""
    title, tree = PICTURES[name]
    return {"title": title, "parents": list(tree.parents), "slots": list(tree.slots)}


def draw(name: str, path: Path) -> None:
    """Draws the picture; `path` ends in .svg or .png."""
    title, tree = PICTURES[name]
    picture.save(path, lambda: tree.draw().figure, title=title, story=story_of(name))


def check(root: Path) -> list[str]:
    """A sentence for each picture that is out of date."""
    wrong = []
    for name in PICTURES:
        path = path_of(name)
        if not (root / path).exists():
            wrong.append(f"{path} does not exist")
        elif not picture.tells(root / path, story_of(name)):
            wrong.append(f"{path} does not show the tree of tools/pictures/attention.py")
        elif not picture.is_redrawn(root / path, partial(draw, name)):
            wrong.append(f"{path} differs from the picture that Tree.draw makes")
    return wrong


def write(root: Path) -> None:
    """Draws all pictures."""
    for name in PICTURES:
        draw(name, root / path_of(name))


def main() -> int:
    """Entry point of `python -m tools.pictures.attention`."""
    return run("pictures.attention", __doc__, lambda root: "; ".join(check(root)), write)


if __name__ == "__main__":
    sys.exit(main())

"""Lines of code, neither empty nor comment alone, of the product and of its tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks import ROOT

PARTS = {"pass_ext, csrc": ("pass_ext", "csrc"), "tests": ("tests",)}
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh")


def measure() -> dict[str, Any]:
    """Part -> its lines; the product's first."""
    return {"lines": {part: sum(map(_lines_below, folders)) for part, folders in PARTS.items()}}


def _lines_below(folder: str) -> int:
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES and file.name != "_build_info.py"]
    return sum(map(lines_of, files))


def lines_of(file: Path) -> int:
    """Lines with code: docstrings count as code, as SQLite's counts of C have none."""
    comment = re.compile(r"\s*(#|$)" if file.suffix == ".py" else r"\s*(//|$)")
    return sum(not comment.match(line) for line in file.read_text().splitlines())

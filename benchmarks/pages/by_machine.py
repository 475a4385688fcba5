"""Pages of results: one, or NAME.md beside the NAME.json of each machine that measured it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import machine

RESULTS = ROOT / "benchmarks/results"


def keep(name: str, result: dict[str, Any]) -> None:
    """Writes this machine's result."""
    folder = RESULTS / machine.device_slug("cpu")
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def write_pages(name: str, render: Callable[[dict[str, Any]], str], *, check: bool) -> int:
    """Writes the pages of all machines; check: writes nothing, and returns 1 if one does not show its result."""
    return max(write_page(path, render, check=check) for path in sorted(RESULTS.glob(f"*/{name}.json")))


def write_page(result: Path, render: Callable[[Any], str], *, check: bool) -> int:
    """As ``write_pages``, the page beside this result."""
    page, text = result.with_suffix(".md"), render(json.loads(result.read_text()))
    if not check:
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        print(f"{page} does not show {result.name}")
        return 1
    return 0

"""Results and pages that each machine has of its own: NAME.json and NAME.md in its folder of results."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    wrong = 0
    for path in sorted(RESULTS.glob(f"*/{name}.json")):
        page, text = path.with_suffix(".md"), render(json.loads(path.read_text()))
        if not check:
            page.write_text(text)
        elif not page.exists() or page.read_text() != text:
            wrong = 1
            print(f"{page.relative_to(ROOT)} does not show {path.name}")
    return wrong

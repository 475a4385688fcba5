"""Pages of results: one, or NAME.md beside the NAME.json of each machine that measured it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import machine

RESULTS = "benchmarks/results"


def keep(name: str, result: dict[str, Any]) -> None:
    """Writes this machine's result."""
    folder = ROOT / RESULTS / machine.device_slug("cpu")
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def write_pages(name: str, render: Callable[[Any], str], *, check: bool, root: Path = ROOT) -> list[str]:
    """Writes the pages of all machines, whose results match the name; check: writes nothing, and returns a sentence for
    each page that does not show its result."""
    wrong = []
    for result in sorted(root.glob(f"{RESULTS}/*/{name}.json")):
        page, text = result.with_suffix(".md"), render(json.loads(result.read_text()))
        if not check:
            page.write_text(text)
        elif not page.exists() or page.read_text() != text:
            wrong.append(f"{page.relative_to(root)} does not show {result.name}")
    return wrong


def say(wrong: list[str], command: str | None = None) -> int:
    """Prints the sentences, and how the pages are written: the exit status."""
    for words in wrong:
        print(f"{words}: run python -m {command}" if command else words, file=sys.stderr)
    return 1 if wrong else 0


def parser_of(doc: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """The options of every page's command: --render and --check measure nothing. rounds: --rounds, if not given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    if rounds is not None:
        parser.add_argument("--rounds", type=_rounds, default=rounds, help=f"{rounds} if not given")
    return parser


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


def command(
    name: str, options: argparse.Namespace, measure: Callable[[], dict[str, Any]], render: Callable[[Any], str]
) -> int:
    """Measures and keeps a result unless an option says otherwise, and writes or checks the pages of all machines."""
    if not (options.render or options.check):
        keep(name, measure())
    return say(write_pages(name, render, check=options.check))

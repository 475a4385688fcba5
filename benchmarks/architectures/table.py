"""The command of a table: each model of a list is judged, what was judged before is kept, result and page are written."""

import argparse
import contextlib
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.harness.results import save

Line = dict[str, Any]
"""What was found of a model; its name is at "architecture"."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers says nothing but errors."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(before)


def versions() -> dict[str, str]:
    """The versions of transformers and torch."""
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__}


def command(
    description: str | None,
    result: Path,
    page: Path,
    names: Callable[[], Iterable[str]],
    judge: Callable[[str], Line],
    render: Callable[[dict[str, Any]], str],
) -> int:
    """Entry point of a table's program. result, page: below the repository."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models to judge; default: all")
    parser.add_argument("--render", action="store_true", help="judge nothing; write the page from the result")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"transformers has no model {', '.join(unknown)} of this table")
    file, shown = options.root / result, options.root / page
    if options.check:
        if not shown.exists() or shown.read_text() != render(json.loads(file.read_text())):
            print(f"{page} does not show {result}: run this program with --render", file=sys.stderr)
            return 1
        return 0
    if not options.render:
        known = {line["architecture"]: line for line in json.loads(file.read_text())["rows"]} if options.names else {}
        for name in options.names or names():
            with quiet():
                known[name] = judge(name)
            print(json.dumps(known[name]), flush=True)
            gc.collect()
        rows = [known[name] for name in names() if name in known]
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        save({"date": date, "versions": versions(), "rows": rows}, file)
    shown.write_text(render(json.loads(file.read_text())))
    return 0

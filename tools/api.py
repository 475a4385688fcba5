"""Writes docs/api.md: every public name with its signature and the first paragraph of its docstring.

`python -m tools.api`, and `--check`.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pass_ext
import pass_ext.distributed
import pass_ext.drafting
import pass_ext.integrations.grammar
import pass_ext.integrations.transformers
import pass_ext.layers
from pass_ext.decoding.generation import Generation
from pass_ext.decoding.stats import GenerationStats
from pass_ext.ops.accept import STATUS, TokenLogprobs
from pass_ext.tree import PackedTrees
from tools.command import run

PAGE = Path("docs/api.md")
HEAD = """# Public names

Written by `python -m tools.api`; do not edit. `help(pass_ext.generate)` and the like show the whole of each text.
"""
LONGEST_LINE = 100


MODULES = (
    pass_ext,
    pass_ext.layers,
    pass_ext.distributed,
    pass_ext.drafting,
    pass_ext.integrations.grammar,
    pass_ext.integrations.transformers,
)
# What calls return, which nobody has to import.
RESULTS = {
    "pass_ext.decoding.generation.Generation": Generation,
    "pass_ext.decoding.stats.GenerationStats": GenerationStats,
    "pass_ext.ops.accept.STATUS": STATUS,
    "pass_ext.ops.accept.TokenLogprobs": TokenLogprobs,
    "pass_ext.tree.PackedTrees": PackedTrees,
}


def names_of(module: ModuleType) -> list[str]:
    """The public names of a module in alphabetical order."""
    return sorted((name for name in module.__all__ if not name.startswith("__")), key=str.lower)


def entry(name: str, value: Any) -> str:
    """The entry of a name: a heading, its signature or value, its first paragraph."""
    if not callable(value):
        return f"### `{name}`\n\n```python\n{name} = {written(value)}\n```\n"
    return f"### `{name}`\n\n```python\n{signature(name, value)}\n```\n\n{first_paragraph(value)}\n"


def written(value: Any) -> str:
    """A value as ruff would format it: strings in double quotes, a dictionary with a line for each entry."""
    if isinstance(value, dict):
        return "{\n" + "".join(f"    {written(key)}: {written(entry)},\n" for key, entry in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def signature(name: str, value: Any) -> str:
    """``name(…)``, with a line for each parameter where one line would be long; a protocol's name alone."""
    if getattr(value, "_is_protocol", False):
        return f"class {name}(Protocol)"
    parameters = list(inspect.signature(value).parameters.values())
    shown = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(x.startswith("*") for x in shown):
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f"={written(parameter.default)}"
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(f"{star}{parameter.name}{default}")
    line = f"{name}({', '.join(shown)})"
    if len(line) <= LONGEST_LINE:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in shown) + ")"


def first_paragraph(value: Any) -> str:
    """The first paragraph of a docstring, on one line, in Markdown."""
    text = inspect.getdoc(value) or ""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split("\n\n")[0].split()))


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for module in MODULES:
        parts += [f"## {module.__name__}\n", *(entry(name, getattr(module, name)) for name in names_of(module))]
    parts += ["## Results\n", *(entry(name, value) for name, value in RESULTS.items())]
    return "\n".join(parts)


def check(root: Path) -> str | None:
    """The path of the page where it differs from the names; None where it does not."""
    return None if (root / PAGE).read_text() == page() else str(PAGE)


if __name__ == "__main__":
    sys.exit(run("api", __doc__, check, lambda root: (root / PAGE).write_text(page())))

"""A page from its template, NAME.template beside the module: Markdown with `{fields}` of a result and of the module."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def words_of(versions: Mapping[str, str]) -> str:
    """The versions in words."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def page(module: str, result: Mapping[str, Any], **made: Any) -> str:
    """The page of the module at this path. A list is lines; ``{versions}`` are words, ``{made_by}`` is date, commit and
    versions, and ``{cpu}`` the processor and its threads."""
    words = dict(result)
    if "versions" in result:
        words["versions"] = words_of(result["versions"])
    if {"commit", "versions"} <= result.keys():
        words["made_by"] = f"{result['date'][:10]}, commit {result['commit']}, {words['versions']}"
    if "machine" in result:
        words["cpu"] = f"{result['machine'].get('model')}, {result['machine'].get('torch_threads')} threads"
    words |= {name: "\n".join(part) if isinstance(part, list) else part for name, part in made.items()}
    return Path(module).with_suffix(".template").read_text().format_map(words)

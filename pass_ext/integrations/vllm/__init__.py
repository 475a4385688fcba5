"""pass_ext inside vLLM."""

from __future__ import annotations


def register() -> None:
    """The entry point: an engine calls it in each of its processes. It never raises."""

"""pass_ext inside vLLM."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """The entry point: an engine calls it in each of its processes. It never raises."""


def __getattr__(name: str) -> Any:
    if name == "PaSS":  # loaded at first use: a plugin is imported in every process
        from pass_ext.integrations.vllm.proposer import PaSS

        return PaSS
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

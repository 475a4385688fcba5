"""The draft model that ``--draft`` names: a model of its own, or the target left early.

    PATH or NAME        as --model takes it
    exit:LAYERS         the target's first layers, ``EarlyExitDraft``
    exit:NAME_OR_FILE   the same with its adapter

A name is that of a shipped adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pass_ext.decoding.models.vocabulary import check_tokenizers
from pass_ext.training.common.frozen_model import load_frozen

_EXIT = "exit:"


def check_draft(given: str) -> None:
    """Says what no draft can be, before anything is loaded."""
    name = given.removeprefix(_EXIT)
    if not name:
        raise SystemExit(f"--draft must be a model, exit:LAYERS or exit:NAME_OR_FILE, got {given!r}")
    if name != given and name.isdigit() and int(name) < 1:
        raise SystemExit(f"--draft {given} must leave at least 1 layer")


def load_draft(given: str, model: Any, tokenizer: Any, dtype: torch.dtype) -> Any:
    """What ``packed_model`` takes."""
    if not given.startswith(_EXIT):
        draft, other = load_frozen(given, dtype)
        try:
            check_tokenizers(tokenizer, other)
        except ValueError as error:
            raise SystemExit(f"--draft {given!r}: {error}") from error
        return draft
    from pass_ext.decoding.models.early_exit_draft import EarlyExitDraft

    name = given.removeprefix(_EXIT)
    try:
        return EarlyExitDraft(model, layers=int(name)) if name.isdigit() else EarlyExitDraft(model, adapter=name)
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(f"--draft {given!r}: {error}") from error


def draft_name(given: str) -> str:
    """As the file of a decision model says it: without folders."""
    prefix = _EXIT if given.startswith(_EXIT) else ""
    return prefix + Path(given.removeprefix(_EXIT)).name.removesuffix(".gguf").removesuffix(".safetensors")

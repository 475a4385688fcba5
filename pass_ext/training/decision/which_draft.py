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


def check_draft(argument: str) -> None:
    """Refuses what cannot be a draft, before anything is loaded."""
    name = argument.removeprefix(_EXIT)
    if not name:
        raise SystemExit(f"--draft must be a model, exit:LAYERS or exit:NAME_OR_FILE, got {argument!r}")
    if name != argument and name.isdigit() and int(name) < 1:
        raise SystemExit(f"--draft {argument} must leave at least 1 layer")


def load_draft(argument: str, model: Any, tokenizer: Any, dtype: torch.dtype) -> Any:
    """The draft model, in a form that ``packed_model`` takes."""
    if not argument.startswith(_EXIT):
        draft, other = load_frozen(argument, dtype)
        try:
            check_tokenizers(tokenizer, other)
        except ValueError as error:
            raise SystemExit(f"--draft {argument!r}: {error}") from error
        return draft
    from pass_ext.decoding.models.early_exit import EarlyExitDraft

    name = argument.removeprefix(_EXIT)
    try:
        return EarlyExitDraft(model, layers=int(name)) if name.isdigit() else EarlyExitDraft(model, adapter=name)
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(f"--draft {argument!r}: {error}") from error


def draft_name(argument: str) -> str:
    """The draft's name in the file of a decision model: without folders."""
    prefix = _EXIT if argument.startswith(_EXIT) else ""
    return prefix + Path(argument.removeprefix(_EXIT)).name.removesuffix(".gguf").removesuffix(".safetensors")

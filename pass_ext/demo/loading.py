"""Loads the model, its tokenizer and its look-ahead embeddings; a failure ends the command with one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pass_ext
from pass_ext.checkpoint import load_checkpoint
from pass_ext.demo.extras import end_without


def load_model(path: str) -> tuple[Any, Any]:
    """The model in bfloat16 and its tokenizer."""
    try:
        return load_checkpoint(path, torch.bfloat16)
    except ImportError as error:
        end_without(error)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be loaded as a transformers model: {error}") from error


def load_lookahead(source: str | None, model_path: str, table: Tensor) -> pass_ext.LookaheadEmbedding | None:
    """The embeddings of the file or name ``source``. Without it, the shipped ones whose name begins the model's, or None."""
    if source is None:
        name = Path(model_path).name.lower()
        source = next((shipped for shipped in pass_ext.LookaheadEmbedding.shipped() if name.startswith(shipped)), None)
        if source is None:
            return None
    try:
        return pass_ext.LookaheadEmbedding.from_pretrained(source, table=table)
    except ValueError as error:
        raise SystemExit(f"--lookahead {source}: {error}") from error

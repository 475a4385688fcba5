"""``packed_model``: adapts whatever model a caller gives to packed rows, and refuses what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pass_ext.decoding.arguments import type_of
from pass_ext.decoding.models.early_exit import EarlyExitDraft, EarlyExitModel
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.transformers import TransformersModel


def packed_model(model: Any) -> Adapted:
    """Adapts a transformers model, an ``EarlyExitDraft`` or a ``PackedModel``."""
    if isinstance(model, Adapted):
        return model
    if isinstance(model, EarlyExitDraft):
        return EarlyExitModel(model)
    if hasattr(model, "get_input_embeddings") and hasattr(model, "config"):
        return TransformersModel(model)
    if isinstance(model, Callable) and getattr(model, "embedding", None) is not None:  # type: ignore[arg-type]
        return Adapted(model)
    raise TypeError(
        "model must be a transformers model that writes text, or a callable with an attribute `embedding` "
        f"(pass_ext.PackedModel), got {type_of(model)}"
    )

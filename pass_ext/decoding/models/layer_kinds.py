"""The kinds of a model's layers, by the names of transformers' configs."""

from __future__ import annotations

from typing import Any

STATES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Layers that keep a state; the hybrid ones attend too."""
HYBRID = frozenset({"hybrid", "hybrid_sliding"})
PLAIN = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Layers that attend to keys, all or the last of them; those of features are in their ``kinds``."""
NOTHING = frozenset({"mlp", "moe"})
"""Layers that keep nothing."""


def kinds_of(text: Any) -> list[str]:
    """The kinds of a model's layers, by its config's ``layer_types``; []: it gives none."""
    return list(getattr(text, "layer_types", None) or ())


def keeps_states(text: Any) -> bool:
    """True if some layers keep a state."""
    return not STATES.isdisjoint(kinds_of(text))

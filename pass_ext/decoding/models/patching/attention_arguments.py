"""Finds attention arguments that pass_ext does not implement."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

# Tensors that models pass to attention and that do not change its result.
_INERT = {
    "cache_position",
    "input_ids",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "position_ids",
    "token_type_ids",
}


def unsupported(module: nn.Module, rows: int, dropout: float, others: dict[str, Any]) -> str | None:
    """Describes the first unsupported argument, to follow "pass_ext attention: "; None: all are supported.

    rows: of the call, per request.
    """
    name = type(module).__name__
    if dropout > 0.0 and module.training:
        return f"{name} asks for dropout {dropout}; call model.eval(), or train with 'sdpa'"
    causal = getattr(module, "is_causal", True)
    # Some models pass is_causal=False for a single row, because it sees every key.
    if not (causal if rows == 1 else others.get("is_causal", causal)):
        return f"{name} is not causal"
    if others.get("output_attentions"):
        return "output_attentions is not implemented"
    if others.get("s_aux") is not None:
        return f"{name} has attention sinks (s_aux), which are not implemented"
    for argument, value in others.items():
        if argument not in _INERT and (isinstance(value, Tensor) or (value and argument in {"cache", "block_mask"})):
            return f"{name} hands down {argument!r}, which may change the result and is not implemented"
    return None

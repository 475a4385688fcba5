"""Which of the things that a transformers model hands down to its attention would change the result and are not implemented."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

# Tensors that models hand down and that attention does not depend on.
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
    """What it is, to follow "pass_ext attention: "; None where there is nothing. rows: of the call, per request."""
    name = type(module).__name__
    if dropout > 0.0 and module.training:
        return f"{name} asks for dropout {dropout}; call model.eval(), or train with 'sdpa'"
    causal = getattr(module, "is_causal", True)
    if not (
        causal if rows == 1 else others.get("is_causal", causal)
    ):  # of one row, some say that it is not, as it sees all
        return f"{name} is not causal"
    if others.get("output_attentions"):
        return "output_attentions is not implemented"
    if others.get("s_aux") is not None:
        return f"{name} has attention sinks (s_aux), which are not implemented"
    for argument, given in others.items():
        if argument not in _INERT and (isinstance(given, Tensor) or (given and argument in {"cache", "block_mask"})):
            return f"{name} hands down {argument!r}, which may change the result and is not implemented"
    return None

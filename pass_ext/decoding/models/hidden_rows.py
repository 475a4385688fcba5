"""``kept_hidden``: keeps the input rows of a model's output layer from its last call.

A ``TransformersModel`` keeps them itself; of another model with ``get_output_embeddings()``, a hook before that module does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.transformers import KeptHidden, TransformersModel


@contextmanager
def kept_hidden(adapted: Adapted) -> Iterator[KeptHidden]:
    """Yields a ``KeptHidden`` that holds the output layer's input rows from the last call of ``adapted``."""
    model, hidden = adapted.model, KeptHidden()
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"hidden rows are the input of the module that get_output_embeddings() gives, and {type(model).__name__} has none: "
            "use a decision model of kind 'entropy', or give the model that method"
        )
    with adapted.attached():
        if isinstance(adapted, TransformersModel):
            with adapted.keeping(hidden):
                yield hidden
            return

        def before_head(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            hidden.keep(arguments[0], None)

        hook: Any = head.register_forward_pre_hook(before_head)
        try:
            yield hidden
        finally:
            hook.remove()

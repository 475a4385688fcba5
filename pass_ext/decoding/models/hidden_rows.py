"""``kept_hidden``: the rows that went into a model's output layer, kept from its last call.

A hook before ``get_output_embeddings()``. Hooks around the model tell its calls from those of another model that has the same
output layer, and which rows were wanted, for models that compute all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from pass_ext.decoding.models.packed import Adapted


class KeptHidden:
    """``rows`` after a call."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._wanted: Tensor | None = None
        self._called = True

    @property
    def rows(self) -> Tensor:
        """``[rows, d]``, a row for each row of the last call's logits. Holds until the next call."""
        if self._rows is None:
            raise RuntimeError(
                "no hidden rows are kept: the model was not called yet, or it does not call its output layer (a replayed "
                "CUDA graph calls none)"
            )
        if self._wanted is not None and len(self._rows) != len(self._wanted):
            return self._rows[self._wanted]
        return self._rows

    def before_model(self, _module: nn.Module, _arguments: Any, options: dict[str, Any]) -> None:
        """The hook before a model of transformers."""
        wanted = options.get("logits_to_keep")
        self._rows, self._wanted = None, wanted if isinstance(wanted, Tensor) else None
        self._called = True

    def after_model(self, *_: Any) -> None:
        """The hook behind it."""
        self._called = False

    def before_head(self, _module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """The hook before the output layer."""
        if self._called:
            self._rows = arguments[0].flatten(0, -2)


@contextmanager
def kept_hidden(adapted: Adapted) -> Iterator[KeptHidden]:
    """Inside, ``rows`` of what this yields are the output layer's input in the last call of ``adapted``."""
    model = adapted.model
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"hidden rows are the input of the module that get_output_embeddings() gives, and {type(model).__name__} has none: "
            "use a decision model of kind 'entropy', or give the model that method"
        )
    kept = KeptHidden()
    with adapted.attached(), ExitStack() as hooks:  # attached first: few_rows_linear passes by layers with hooks
        if isinstance(model, nn.Module):
            hooks.callback(model.register_forward_pre_hook(kept.before_model, with_kwargs=True).remove)
            hooks.callback(model.register_forward_hook(kept.after_model).remove)
            kept.after_model()
        hooks.callback(head.register_forward_pre_hook(kept.before_head).remove)
        yield kept

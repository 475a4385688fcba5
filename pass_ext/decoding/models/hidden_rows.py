"""``kept_hidden``: keeps the input rows of a model's output layer from its last call.

A hook before ``get_output_embeddings()`` stores them. Hooks around the model distinguish its calls from those of another model
with the same output layer, and store which rows the caller asked for, because some models compute all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from pass_ext.decoding.models.packed import Adapted


class KeptHidden:
    """The hidden rows of the last call, and the hooks that store them."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._wanted: Tensor | None = None
        self._called = True

    @property
    def rows(self) -> Tensor:
        """``[rows, d]``, one for each row of the last call's logits. Valid until the next call."""
        if self._rows is None:
            raise RuntimeError(
                "no hidden rows are kept: the model was not called yet, or it does not call its output layer (a replayed "
                "CUDA graph calls none)"
            )
        if self._wanted is not None and len(self._rows) != len(self._wanted):
            return self._rows[self._wanted]
        return self._rows

    def before_model(self, _module: nn.Module, _arguments: Any, options: dict[str, Any]) -> None:
        """The hook before a transformers model."""
        rows = options.get("logits_to_keep")
        self._rows, self._wanted = None, rows if isinstance(rows, Tensor) else None
        self._called = True

    def after_model(self, *_: Any) -> None:
        """The hook after the model."""
        self._called = False

    def before_head(self, _module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """The hook before the output layer."""
        if self._called:
            self._rows = arguments[0].flatten(0, -2)


@contextmanager
def kept_hidden(adapted: Adapted) -> Iterator[KeptHidden]:
    """Yields a ``KeptHidden`` that holds the output layer's input rows from the last call of ``adapted``."""
    model = adapted.model
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"hidden rows are the input of the module that get_output_embeddings() gives, and {type(model).__name__} has none: "
            "use a decision model of kind 'entropy', or give the model that method"
        )
    hidden = KeptHidden()
    with adapted.attached(), ExitStack() as hooks:  # attached first: few_rows_linear skips layers with hooks
        if isinstance(model, nn.Module):
            hooks.callback(model.register_forward_pre_hook(hidden.before_model, with_kwargs=True).remove)
            hooks.callback(model.register_forward_hook(hidden.after_model).remove)
            hidden.after_model()
        hooks.callback(head.register_forward_pre_hook(hidden.before_head).remove)
        yield hidden

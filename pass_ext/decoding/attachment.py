"""``attached``: a transformers model as generations need it, and as it was when the last of them ends.

Meanwhile its attention is ours, its linear layers on the CPU are ``few_rows_linear``, it is in eval mode, and look-ahead slots
may shift the input of its layers. Generations on one model, nested or in several threads, share one attachment. Called by
``transformers_model``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

from torch import nn

from pass_ext.decoding.few_rows import few_rows_linear
from pass_ext.decoding.layer_offsets import LayerOffsets

KEY = "pass_ext_rows"
_lock = RLock()
_attachments: dict[int, Attachment] = {}
"""Of models that are attached, by id: each holds its model."""


class Attachment:
    """See the module."""

    def __init__(self, model: Any, attention: Callable[..., Any]) -> None:
        self.model = model
        self.users = 0
        self._offsets: LayerOffsets | None = None
        with ExitStack() as hooks:
            hooks.enter_context(_attention(model, attention))
            hooks.enter_context(_evaluation(model))
            hooks.enter_context(few_rows_linear(model))
            self._hooks = hooks.pop_all()

    @property
    def offsets(self) -> LayerOffsets:
        """Hooks on the layers from the first time that somebody asks."""
        with _lock:
            if self._offsets is None:
                self._offsets = self._hooks.enter_context(LayerOffsets(self.model).attached())
            return self._offsets

    def close(self) -> None:
        """The model is as it was."""
        self._hooks.close()


@contextmanager
def attached(model: Any, attention: Callable[..., Any]) -> Iterator[None]:
    """``attention`` is registered as transformers' attention function."""
    with _lock:
        attachment = _attachments.get(id(model)) or Attachment(model, attention)
        _attachments[id(model)] = attachment
        attachment.users += 1
    try:
        yield
    finally:
        with _lock:
            attachment.users -= 1
            if not attachment.users:
                del _attachments[id(model)]
                attachment.close()


def attachment_of(model: Any) -> Attachment:
    """Of a model that is attached."""
    attachment = _attachments.get(id(model))
    if attachment is None:
        raise RuntimeError(f"{type(model).__name__} is not attached: rows are given to it inside of `attached()` only")
    return attachment


@contextmanager
def _attention(model: Any, attention: Callable[..., Any]) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(KEY, attention)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(KEY)
        if model.config._attn_implementation != KEY:
            raise ValueError(
                f"{model.config.model_type}: {type(model).__name__} has attention of its own and takes no other "
                "(transformers' AttentionInterface), so pass_ext cannot decode it"
            )
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

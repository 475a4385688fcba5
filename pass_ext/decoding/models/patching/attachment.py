"""``attached``: patches a transformers model while a generation runs and restores it afterwards.

In the generation's calls the model attends by pass_ext, its linear layers on the CPU are ``few_rows_linear``, its norms, rotary
embeddings and gates ``step_modules``, and look-ahead slots may shift the input of its layers and have adapters of its linear
layers. Other calls of the model, also in other threads, compute what they always did. But until the last generation ends the
model is in eval mode, and its config names pass_ext's attention. Generations on one model, nested or in several threads, share
one attachment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

from torch import nn

from pass_ext.decoding.models.patching.direct_call import DirectCall
from pass_ext.decoding.models.patching.few_rows import few_rows_linear
from pass_ext.decoding.models.patching.layer_adapters import LayerAdapters
from pass_ext.decoding.models.patching.layer_calls import layer_calls
from pass_ext.decoding.models.patching.layer_offsets import LayerOffsets
from pass_ext.decoding.models.patching.row_attention import in_our_call, name_for
from pass_ext.decoding.models.patching.step_modules import step_modules
from pass_ext.decoding.models.row_adapters import PlacedAdapters

_lock = RLock()
_attachments: dict[int, Attachment] = {}
"""The attachments by the model's id, which stays valid because each attachment holds its model."""
_switched: dict[int, _Config] = {}
"""Configs that name pass_ext's attention, by id. Models may share a config, as an early-exit draft and its target do."""


class Attachment:
    """The patches of one model, and how many generations use them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.users = 0
        self._offsets: LayerOffsets | None = None
        self._adapters: LayerAdapters | None = None
        with ExitStack() as hooks:
            hooks.enter_context(_attention(model))
            hooks.enter_context(_evaluation(model))
            stack = hooks.enter_context(layer_calls(model))  # first: it takes parts that nothing has replaced yet
            self.direct = DirectCall(model, stack)
            hooks.enter_context(step_modules(model, when=in_our_call))
            hooks.enter_context(few_rows_linear(model, when=in_our_call))
            self._hooks = hooks.pop_all()

    @property
    def offsets(self) -> LayerOffsets:
        """The hooks that shift layer inputs, registered at first use."""
        with _lock:
            if self._offsets is None:
                self._offsets = self._hooks.enter_context(LayerOffsets(self.model).attached())
            return self._offsets

    def prepare(self, adapters: PlacedAdapters) -> None:
        """Registers the hooks that add these adapters, at first use."""
        with _lock:
            if self._adapters is None:
                self._adapters = LayerAdapters(self.model)
                self._hooks.callback(self._adapters.close)
            self._adapters.prepare(adapters)

    def close(self) -> None:
        """Restores the model."""
        self._hooks.close()


@contextmanager
def attached(model: Any) -> Iterator[None]:
    """Patches the model inside the context; nested contexts share the patches."""
    with _lock:
        attachment = _attachments.get(id(model)) or Attachment(model)
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
    """The attachment of a model inside ``attached``."""
    attachment = _attachments.get(id(model))
    if attachment is None:
        raise RuntimeError(f"{type(model).__name__} is not attached: it takes packed rows inside `attached()` only")
    return attachment


class _Config:
    """A config, the attention that it named before, and how many attachments use it."""

    def __init__(self, config: Any) -> None:
        self.config, self.former, self.users = config, config._attn_implementation, 0


@contextmanager
def _attention(model: Any) -> Iterator[None]:
    configs = _configs(model)
    for config in configs:
        _switched.setdefault(id(config), _Config(config)).users += 1
    try:
        ours = name_for(_switched[id(model.config)].former)
        model.set_attn_implementation(ours)
        if model.config._attn_implementation != ours:
            raise ValueError(
                f"{model.config.model_type}: {type(model).__name__} has attention of its own and takes no other "
                "(transformers' AttentionInterface), so pass_ext cannot decode it"
            )
        for config in configs:
            if config._attn_implementation == ours:  # set_attn_implementation skips parts whose attention is fixed
                _set(config, name_for(_switched[id(config)].former))
        yield
    finally:
        for config in configs:
            switched = _switched[id(config)]
            switched.users -= 1
            if not switched.users:
                del _switched[id(config)]
                _set(config, switched.former)


def _configs(model: Any) -> list[Any]:
    """The model's config and those of its parts."""
    configs, queue = {}, [model.config]
    while queue:
        config = queue.pop()
        configs[id(config)] = config
        queue += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    for part in model.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return list(configs.values())


def _set(config: Any, attention: str | None) -> None:
    """Sets the config's attention; with a dictionary its sub-configs stay unchanged."""
    config._attn_implementation = {"": attention}


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

"""``attached``: patches a transformers model while a generation runs and restores it afterwards.

In the generation's calls the model attends by pass_ext, its linear layers on the CPU are ``few_rows_linear``, its norms, rotary
embeddings and gates ``step_modules``, and look-ahead slots may shift the input of its layers and have adapters of its linear
layers. Other calls of the model, also in other threads, compute what they always did. But until the last generation ends the
model is in eval mode, and its config names pass_ext's attention. Generations on one model, nested or in several threads, share
one attachment.

Finding the parts takes longer than a step of a small model, so what is put in their place is kept for the next generation, and
with it what calls have shown (``LayerStack``, ``DirectCall``), as long as the model is the same in all that it may depend on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from operator import is_
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
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
            parts = _kept_parts(model)
            self.direct = parts.direct
            hooks.enter_context(parts.in_place())
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


class _Parts(NamedTuple):
    """What computes in place of a model's parts."""

    direct: DirectCall
    forwards: list[tuple[dict[str, Any], Callable[..., Any]]]
    """(a module's attributes, its forward)"""
    state: list[Any]
    configs: list[dict[str, Any]]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Sets the forwards, and removes them at the end."""
        self.direct.begin()
        try:
            for attributes, forward in self.forwards:
                attributes["forward"] = forward
            yield
        finally:
            for attributes, _ in self.forwards:
                attributes.pop("forward", None)


_kept: MutableMapping[nn.Module, _Parts] = WeakKeyDictionary()


def _kept_parts(model: nn.Module) -> _Parts:
    """The parts of the last generation, if the model has not changed since; else they are found anew."""
    state, configs = _state_of(model), [vars(config) for config in _configs(model)]
    known = _kept.get(model)
    is_same = known is not None and len(known.state) == len(state) and all(map(is_, known.state, state))
    if known is not None and is_same and known.configs == configs:
        return known
    modules = [part for part in model.modules() if "forward" not in vars(part)]
    with ExitStack() as patches:
        stack = patches.enter_context(layer_calls(model))  # first: it takes parts that nothing has replaced yet
        direct = DirectCall(model, stack)
        patches.enter_context(step_modules(model, when=in_our_call))
        patches.enter_context(few_rows_linear(model, when=in_our_call))
        forwards = [(vars(part), vars(part)["forward"]) for part in modules if "forward" in vars(part)]
    parts = _kept[model] = _Parts(direct, forwards, state, copy.deepcopy(configs))
    return parts


def _state_of(model: nn.Module) -> list[Any]:
    """All objects by which parts are found: classes and their code, attributes, weights and hooks. Numbers may change inside a
    tensor, which is read in each call."""
    state: list[Any] = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    state.append(nn.modules.module._has_any_global_hook())
    files = {}
    for part in model.modules():
        attributes, forward = vars(part), type(part).forward
        state += (type(part), forward)
        if part is not model:  # an attribute may lead back to the model, which would then be kept for ever
            state += attributes.values()
        for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
            state += attributes[name].values()
        names = getattr(forward, "__globals__", {})
        files[id(names)] = names
    for names in files.values():  # the functions that the code calls may be replaced in its file
        state += names.values()
    return state


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
        config = vars(part).get("config")
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return list(configs.values())


def _set(config: Any, attention: str | None) -> None:
    """Sets the config's attention; with a dictionary its sub-configs stay unchanged."""
    config._attn_implementation = {"": attention}


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

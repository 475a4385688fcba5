"""``attached``: patches a transformers model while a generation runs and restores it afterwards.

In the generation's calls the model attends by pass_ext, its linear layers (on a GPU small ones) are ``few_rows_linear``, its
norms, rotary embeddings and gates ``step_modules``, and look-ahead slots may shift the input of its layers and have adapters of
its linear layers. Other calls of the model, also in other threads, compute what they always did. But until the last generation
ends the model is in eval mode, and its config names pass_ext's attention. Generations on one model, nested or in several
threads, share one attachment.

Finding the parts takes longer than a step of a small model, so what is put in their place is kept for the next generation, in
an attribute of the model, and with it what calls have shown (``LayerStack``, ``DirectCall``), as long as the model is the same
in all that it may depend on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import is_
from threading import RLock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from pass_ext.decoding.models.patching.direct_call import DirectCall
from pass_ext.decoding.models.patching.few_rows import few_rows_linear
from pass_ext.decoding.models.patching.layer_adapters import LayerAdapters
from pass_ext.decoding.models.patching.layer_calls import layer_calls
from pass_ext.decoding.models.patching.layer_offsets import LayerOffsets
from pass_ext.decoding.models.patching.layer_stack import LayerStack
from pass_ext.decoding.models.patching.row_attention import are_few_of_our_call, in_our_call, name_for
from pass_ext.decoding.models.patching.step_modules import step_modules
from pass_ext.decoding.models.plain_tensors import is_plain
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
        modules = list(model.modules())  # once: it takes longer than all that is done with them
        with ExitStack() as hooks:
            configs = hooks.enter_context(_attention(model, modules))
            hooks.enter_context(_evaluation(model, modules))
            parts = _kept_parts(model, modules, configs)
            self.direct, self._adapters = parts.direct, parts.adapters
            hooks.callback(self._adapters.close)
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
            self._adapters.prepare(adapters)

    def close(self) -> None:
        """Restores the model."""
        self._hooks.close()


class _State(NamedTuple):
    """All by which parts are found. Numbers may change inside a tensor, which is read in each call."""

    objects: list[Any]
    """Classes, their code, weights, settings and hooks, to be compared by identity."""
    places: list[Any]
    """Where weights lie, and as what, to be compared by value."""

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> _State:
        """The state of a model with these modules whose attention is switched and that is in eval mode."""
        objects: list[Any] = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
        objects.append(bool(nn.modules.module._has_any_global_hook()))
        places: list[Any] = []
        codes: set[Any] = set()
        for part in modules:
            attributes, forward = vars(part), type(part).forward
            objects += (type(part), forward)
            objects += [value for name, value in attributes.items() if name not in _OF_EVERY_MODULE]
            for function in _chain(forward):
                code = getattr(function, "__code__", None)
                if code is not None and code not in codes:  # the functions that it calls may be replaced in its file
                    codes.add(code)
                    objects += [function.__globals__.get(name) for name in code.co_names]
            for name in ("_parameters", "_buffers"):
                for tensor in attributes[name].values():
                    objects.append(tensor)
                    if tensor is not None and is_plain(tensor):  # others may have no place
                        places += (tensor.data_ptr(), tensor.dtype)
            for name in ("_modules", "_forward_hooks", "_forward_pre_hooks"):
                objects += attributes[name].values()
        return cls(objects, places)

    def is_now(self, other: _State) -> bool:
        """True if nothing has changed."""
        if len(self.objects) != len(other.objects) or self.places != other.places:
            return False
        return all(map(is_, self.objects, other.objects))


def _chain(function: Any) -> Iterator[Any]:
    """The function and those behind its decorators."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


KEPT = "_pass_ext_parts"
"""The attribute of a model in which its parts are kept. There, and not in a dictionary by model, they end with the model, even
if something among them leads back to it."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {KEPT}


@dataclass(frozen=True, eq=False)
class Parts:
    """What computes in place of a model's parts. A copied or pickled model has none."""

    owner: ref[nn.Module]
    """A shallow copy of a model has its parts too, but is not their owner."""
    direct: DirectCall
    adapters: LayerAdapters
    stack: LayerStack
    forwards: list[tuple[dict[str, Any], Callable[..., Any]]]
    """(a module's attributes, its forward)"""
    state: _State
    configs: Any
    """Copies of the configs' attributes; None: they cannot be copied."""

    def are_of(self, model: nn.Module, state: _State, configs: list[dict[str, Any]]) -> bool:
        """True if the model is theirs, and as it was."""
        try:
            return self.owner() is model and self.state.is_now(state) and bool(self.configs == configs)
        except Exception:  # attributes that cannot be compared
            return False

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Sets the forwards, and removes them at the end."""
        try:
            for attributes, forward in self.forwards:
                attributes["forward"] = forward
            yield
        finally:
            for attributes, _ in self.forwards:
                attributes.pop("forward", None)
            self.direct.end()
            self.stack.end()


def _kept_parts(model: nn.Module, modules: Sequence[nn.Module], all_configs: Sequence[Any]) -> Parts:
    """The parts of the last generation, if the model has not changed since; else they are found anew."""
    state, configs = _State.of(modules), [vars(config) for config in all_configs]
    known = vars(model).get(KEPT)
    if isinstance(known, Parts) and known.are_of(model, state, configs):
        return known
    free = [part for part in modules if "forward" not in vars(part)]
    with ExitStack() as patches:
        stack = patches.enter_context(layer_calls(model))  # first: it takes parts that nothing has replaced yet
        direct = DirectCall(model, stack)
        patches.enter_context(step_modules(model, when=in_our_call))
        patches.enter_context(few_rows_linear(model, takes=are_few_of_our_call))
        forwards = [(vars(part), vars(part)["forward"]) for part in free if "forward" in vars(part)]
    adapters = LayerAdapters(model)
    parts = vars(model)[KEPT] = Parts(ref(model), direct, adapters, stack, forwards, state, _copies(configs))
    return parts


def _copies(configs: list[dict[str, Any]]) -> Any:
    try:
        return copy.deepcopy(configs)
    except Exception:  # an attribute that cannot be copied: the parts are found anew each time
        return None


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
def _attention(model: Any, modules: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Switches the attention; yields the configs that name it."""
    configs = _configs(model, modules)
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
        yield configs
    finally:
        for config in configs:
            switched = _switched[id(config)]
            switched.users -= 1
            if not switched.users:
                del _switched[id(config)]
                _set(config, switched.former)


def _configs(model: Any, modules: Sequence[nn.Module]) -> list[Any]:
    """The model's config and those of its parts."""
    configs, queue = {}, [model.config]
    while queue:
        config = queue.pop()
        configs[id(config)] = config
        queue += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    for part in modules:
        config = vars(part).get("config")
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return list(configs.values())


def _set(config: Any, attention: str | None) -> None:
    """Sets the config's attention; with a dictionary its sub-configs stay unchanged."""
    config._attn_implementation = {"": attention}


@contextmanager
def _evaluation(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    training = [module for module in modules if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

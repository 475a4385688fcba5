"""``attached``: a transformers model's shadow for the calls of a generation, which attends by pass_ext.

Its linear layers (on a GPU small ones) are ``few_rows_linear``, its norms, rotary embeddings and gates ``step_modules``, and
look-ahead slots may shift the input of its layers and have adapters of its linear layers. Generations on one model, nested or
in several threads, share one attachment.

Finding the parts takes longer than a step of a small model, so the shadow is kept for the next generation, in an attribute of
the model, and with it what calls have shown (``LayerStack``, ``DirectCall``), as long as the model is the same in all that it
may depend on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import is_
from threading import RLock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from pass_ext.decoding.models.early_exit.draft import unwrapped
from pass_ext.decoding.models.patching.direct_call import DirectCall
from pass_ext.decoding.models.patching.few_rows import few_rows_linear
from pass_ext.decoding.models.patching.layer_adapters import LayerAdapters
from pass_ext.decoding.models.patching.layer_calls import layer_calls
from pass_ext.decoding.models.patching.layer_offsets import LayerOffsets, decoder_layers
from pass_ext.decoding.models.patching.layer_stack import LayerStack
from pass_ext.decoding.models.patching.row_attention import are_few_of_our_call, attend_by_rows, in_our_call
from pass_ext.decoding.models.patching.shadow import own_hooks, shadow_of
from pass_ext.decoding.models.patching.step_modules import step_modules
from pass_ext.decoding.models.plain_tensors import is_plain
from pass_ext.decoding.models.slots import PlacedAdapters

_lock = RLock()
_attachments: dict[int, Attachment] = {}
"""The attachments by the model's id, which stays valid because each attachment holds its model."""


class Attachment:
    """The shadow of one model, and how many generations use it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.users = 0
        self._offsets: LayerOffsets | None = None
        self._parts = _kept_parts(model)
        self._hooks = ExitStack()
        self.shadow, self.direct = self._parts.shadow, self._parts.direct

    @property
    def offsets(self) -> LayerOffsets:
        """The hooks that shift layer inputs, registered at first use."""
        with _lock:
            if self._offsets is None:
                for layer in decoder_layers(unwrapped(self.shadow)):
                    own_hooks(layer)
                self._offsets = self._hooks.enter_context(LayerOffsets(unwrapped(self.shadow)).attached())
            return self._offsets

    def prepare(self, adapters: PlacedAdapters) -> None:
        """Registers the hooks that add these adapters, at first use."""
        with _lock:
            self._parts.adapters.prepare(adapters)

    def close(self) -> None:
        """Lets go of what the generations' calls have left."""
        self._hooks.close()
        self._parts.adapters.close()
        self._parts.direct.end()
        self._parts.stack.end()


class _State(NamedTuple):
    """All by which parts are found. Numbers may change inside a tensor, which is read in each call."""

    objects: list[Any]
    """Classes, their code, weights, settings and hooks, to be compared by identity."""
    places: list[Any]
    """Where weights lie, and as what, to be compared by value."""

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> _State:
        """The state of a model with these modules."""
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
    """A model's shadow, and what its calls have shown. A copied or pickled model has none."""

    owner: ref[nn.Module]
    """A shallow copy of a model has its parts too, but is not their owner."""
    shadow: Any
    patches: ExitStack
    direct: DirectCall
    adapters: LayerAdapters
    stack: LayerStack
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


def _kept_parts(model: nn.Module) -> Parts:
    """The parts of the last generation, if the model has not changed since; else they are made anew."""
    modules = list(model.modules())  # once: it takes longer than all that is done with them
    state, configs = _State.of(modules), [vars(config) for config in _configs(unwrapped(model), modules)]
    known = vars(model).get(KEPT)
    if isinstance(known, Parts) and known.are_of(model, state, configs):
        return known
    shadow = shadow_of(model)
    inner = unwrapped(shadow)
    attend_by_rows(inner)
    patches = ExitStack()  # left when the shadow ends
    stack = patches.enter_context(layer_calls(inner))  # first: it takes parts that nothing has replaced yet
    direct = DirectCall(inner, stack)
    patches.enter_context(step_modules(inner, when=in_our_call))
    patches.enter_context(few_rows_linear(inner, takes=are_few_of_our_call))
    parts = Parts(ref(model), shadow, patches, direct, LayerAdapters(inner), stack, state, _copies(configs))
    vars(model)[KEPT] = parts
    return parts


def _copies(configs: list[dict[str, Any]]) -> Any:
    try:
        return copy.deepcopy(configs)
    except Exception:  # an attribute that cannot be copied: the parts are made anew each time
        return None


@contextmanager
def attached(model: Any) -> Iterator[None]:
    """The model has a shadow inside the context; nested contexts share it."""
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

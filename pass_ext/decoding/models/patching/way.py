"""``Way``: how a model is run, and why so. It is kept from one generation to the next, as long as the model is the same in all
that it may depend on.

Outside the model, and with no reference to it: a copy has none, and the model ends as ever.
"""

from __future__ import annotations

from operator import is_
from types import MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.patching.model_plan import ModelPlan
from pass_ext.decoding.models.plain_tensors import is_plain

_VALUES = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Way(NamedTuple):
    """A comparison's result."""

    plan: ModelPlan | None
    reason: str
    """Why there is none."""


class ModelState:
    """All by which a model's parts are found. Numbers may change inside a tensor, which is read in each call."""

    def __init__(self, model: nn.Module) -> None:
        self._objects: list[Any] = []
        """Weak references to classes, their code, weights and settings, to be compared by identity."""
        self._values: list[Any] = []
        """Settings, and where weights lie, and as what."""
        kinds: set[type] = set()
        for part in model.modules():
            attributes = vars(part)
            for name in attributes.keys() - _OF_EVERY_MODULE:
                self._note(attributes[name])
            for tensors in (attributes["_parameters"], attributes["_buffers"]):
                for tensor in tensors.values():
                    self._note(tensor)
            for child in attributes["_modules"].values():
                self._note(child)
            self._objects.append(ref(type(part)))
            if type(part) not in kinds:
                kinds.add(type(part))
                self._note_code(type(part).forward)

    def is_same(self, other: ModelState) -> bool:
        """True if nothing has changed."""
        if len(self._objects) != len(other._objects) or not all(map(is_, self._objects, other._objects)):
            return False
        return self._values == other._values

    def _note_code(self, forward: Any) -> None:
        """The functions behind the decorators of a forward, and what their files have by the names that they use."""
        while forward is not None:
            self._note(forward)
            code = getattr(forward, "__code__", None)
            if code is not None:
                self._note(code)
                for name in code.co_names:
                    self._note(forward.__globals__.get(name))
            forward = getattr(forward, "__wrapped__", None)

    def _note(self, value: Any) -> None:
        kind = type(value)
        if kind in _VALUES:
            self._values.append(value)
        elif isinstance(value, Tensor):
            self._objects.append(ref(value))
            if is_plain(value):  # others may have no place
                self._values += (value.data_ptr(), value.dtype)
        elif kind is MethodType:
            self._note(value.__func__)
            self._note(value.__self__)
        elif kind in (list, tuple):
            self._values.append(len(value))
            for entry in value:
                self._note(entry)
        elif kind is dict:
            self._values.append(len(value))
            for name, entry in value.items():
                self._note(name)
                self._note(entry)
        else:
            self._note_object(value)

    def _note_object(self, value: Any) -> None:
        try:
            self._objects.append(ref(value))
        except TypeError:
            self._values.append(id(value))
        if hasattr(value, "sub_configs"):  # settings change inside a config
            for name, entry in vars(value).items():
                if not name.startswith("_attn_implementation"):
                    self._note(entry)


_kept: dict[int, tuple[Any, ModelState, Way]] = {}
"""By the model's id: a weak reference to it, which ends the entry, its state and its way."""


def known_way(model: nn.Module, state: ModelState) -> Way | None:
    """What is kept of a model that is still in this state."""
    owner, former, way = _kept.get(id(model), (None, None, None))
    if owner is None or owner() is not model or former is None or not former.is_same(state):
        return None
    return way


def keep_way(model: nn.Module, state: ModelState, way: Way) -> None:
    """Keeps the way of a model in this state."""
    number = id(model)

    def end(owner: Any) -> None:
        if number in _kept and _kept[number][0] is owner:
            del _kept[number]

    _kept[number] = ref(model, end), state, way

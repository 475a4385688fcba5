"""``shadow_of``: a transformers model's modules once more, on the same weights and hooks, for the calls of a generation.

Attention, layers and configs are changed in the shadow alone. So the caller's model stays as it is while a generation runs:
other threads call, copy and pickle it, and may switch its attention. Weights and hooks that are replaced or added meanwhile are
used; other changes are from the next generation on.
"""

from __future__ import annotations

import copy
from functools import partial
from operator import is_not
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_ATOMS = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor, nn.Parameter})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in _OF_EVERY_MODULE if name.startswith(("_forward_hooks", "_forward_pre_hooks")))


def shadow_of(model: Any) -> Any:
    """The shadow, in eval mode. Tensors, and the dictionaries of parameters and hooks, are the model's own."""
    return _Shadows()(model)


def own_hooks(module: nn.Module) -> None:
    """Gives a shadow hooks of its own, so that further ones are not the model's."""
    for name in _HOOKS:
        vars(module)[name] = copy.copy(vars(module)[name])


class _Shadows:
    """Shadows by the objects that they stand for."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def __call__(self, model: Any) -> Any:
        modules = [part for part in model.modules() if not isinstance(part, torch.jit.ScriptModule)]
        compiled = model if hasattr(model, "_orig_mod") else None
        for part in modules:
            if part is not compiled:
                self._known[id(part)] = object.__new__(type(part))
        for part in modules:
            if part is not compiled:
                self._fill(self._known[id(part)], part)
        if compiled is None:
            return self._known[id(model)]
        return type(model)(self._known[id(model._orig_mod)], model.dynamo_ctx).eval()

    def _fill(self, shadow: Any, part: nn.Module) -> None:
        attributes = vars(shadow)
        attributes.update(vars(part))
        attributes["training"] = False
        attributes["_buffers"] = dict(part._buffers)
        attributes["_modules"] = {name: self._of(child) for name, child in part._modules.items()}
        attributes.pop("_compiled_call_impl", None)
        for name in attributes.keys() - _OF_EVERY_MODULE:
            attributes[name] = self._of(attributes[name])

    def _of(self, value: Any) -> Any:
        """What stands in a shadow for a value that refers to modules or configs; any other value itself."""
        if type(value) in _ATOMS:
            return value
        known = self._known.get(id(value))
        if known is not None:
            return known
        if hasattr(value, "_attn_implementation") and hasattr(value, "sub_configs"):
            return self._of_config(value)
        if type(value) is MethodType:
            owner = self._of(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if type(value) is partial:
            moved = partial(
                value.func, *map(self._of, value.args), **{k: self._of(v) for k, v in value.keywords.items()}
            )
            vars(moved).update(vars(value))
            return moved
        if type(value) in (list, tuple) and value and isinstance(value[0], nn.Module):
            return type(value)(map(self._of, value))
        if type(value) is FunctionType:
            return self._of_function(value)
        return value

    def _of_config(self, config: Any) -> Any:
        moved = self._known[id(config)] = copy.copy(config)
        for name in config.sub_configs:
            if vars(config).get(name) is not None:
                vars(moved)[name] = self._of(vars(config)[name])
        moved.output_hidden_states = False
        return moved

    def _of_function(self, function: FunctionType) -> Any:
        """A function that somebody put in place of a module's, and that may call what it replaced."""
        self._known[id(function)] = function  # where it refers to itself
        cells, defaults, named = function.__closure__ or (), function.__defaults__ or (), function.__kwdefaults__ or {}
        moved = [self._of_cell(cell) for cell in cells], [self._of(value) for value in (*defaults, *named.values())]
        if not any(map(is_not, (*moved[0], *moved[1]), (*cells, *defaults, *named.values()))):
            return function
        made = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            tuple(moved[1][: len(defaults)]),
            tuple(moved[0]),
        )
        made.__kwdefaults__ = dict(zip(named, moved[1][len(defaults) :], strict=True))
        self._known[id(function)] = made
        return made

    def _of_cell(self, cell: CellType) -> CellType:
        try:
            moved = self._of(cell.cell_contents)
        except ValueError:  # empty
            return cell
        return cell if moved is cell.cell_contents else CellType(moved)

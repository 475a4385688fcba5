"""``shadow_of``: a transformers model's modules once more, on the same weights and hooks, for the calls of a generation.

Attention, forwards and configs are changed in the shadow alone. So the caller's model stays as it is while a generation runs:
other threads call, copy and pickle it, and may switch its attention. Weights and hooks that are replaced or added meanwhile are
used; other changes are from the next generation on.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from operator import is_not
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.module_ops import are_few
from pass_ext.decoding.models.one_order import OneOrder
from pass_ext.decoding.models.parts import decoder_layers, decoder_of, linear_at
from pass_ext.decoding.models.slots import CallSlots, with_vectors
from pass_ext.decoding.models.taps import Taps

# ---- a call ----


class OurCall(NamedTuple):
    """A generation's call of a shadow."""

    attend: Any
    """As a ``PackedModel`` takes it; None where nothing attends."""
    model: str = ""
    """For messages."""
    kept: tuple[int, ...] = ()
    """How many keys of a text each layer of transformers' own cache keeps; -1: all."""
    seen: Any = None
    """``[1, N]``, all True: the model's attention_mask. Without it transformers would take rows whose positions do not rise by
    1 for several packed texts, and mask them from each other."""
    slots: CallSlots | None = None
    """What is added to rows of look-ahead slots."""
    attended: Any = None
    """The ``AttentionCalls`` of this call, which notes them."""
    text_rows: int = sys.maxsize
    """As ``StepAttend`` has it, of a call of many rows."""
    positions: Any = None
    """``[N]``, of the rows in the text."""
    batch_invariant: bool = False
    """As ``Session`` takes it."""
    taps: Taps | None = None
    """Takes hidden states."""


current_call: ContextVar[OurCall | None] = ContextVar("current_call", default=None)


@contextmanager
def our_call(call: OurCall) -> Iterator[None]:
    """Inside, and in this thread only, shadows compute this call."""
    token = current_call.set(call)
    try:
        with OneOrder() if call.batch_invariant else nullcontext():
            yield
    finally:
        current_call.reset(token)


def own_call(what: str) -> OurCall:
    """The call that runs in this thread; without one a RuntimeError, for ``what`` a shadow has can be used by no other."""
    call = current_call.get()
    if call is None:
        raise RuntimeError(f"{what} for pass_ext's own calls of a model")
    return call


def takes_rows_of_our_call(rows: int, most: int, *, is_torchs: bool = False) -> bool:
    """Inside ``our_call``, True for few rows of a product that PyTorch does not compute faster."""
    call = current_call.get()
    return call is not None and not is_torchs and are_few(rows, most, call.text_rows)


def add_adapters(shadow: Any, places: Iterable[str]) -> None:
    """Has a shadow's linear layers add the adapters of a call's slots to their outputs."""
    layers = decoder_layers(shadow)
    for place in places:
        module = linear_at(layers, place)
        if module is not None:
            module.forward = partial(_adapted, place, module.forward)


def _adapted(place: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out, call = forward(x), current_call.get()
    return out if call is None or call.slots is None else call.slots.adapt_(place, out, x)


def give_positions(part: Any) -> None:
    """Has a shadow's decoder, or its table of positions, take those of a call's rows, where the model around it does not."""
    part.forward = partial(_placed, part.forward, isinstance(part, nn.Embedding))


def _placed(forward: Callable[..., Any], is_table: bool, /, *inputs: Any, **named: Any) -> Any:
    call = own_call("these positions are")
    return forward(*inputs, **{**named, "position_ids": call.positions if is_table else call.positions[None]})


def shift_layers(shadow: Any) -> None:
    """Has a shadow's layers add the vectors of a call's slots to their inputs."""
    for number, layer in enumerate(decoder_layers(shadow)):
        layer.forward = partial(_shifted, number, layer.forward)


def _shifted(number: int, forward: Callable[..., Any], *inputs: Tensor, **named: Any) -> Any:
    call = current_call.get()
    if call is None or call.slots is None or call.slots.offsets is None:
        return forward(*inputs, **named)
    offsets = call.slots.offsets[number]
    if inputs:
        return forward(with_vectors(inputs[0], offsets), *inputs[1:], **named)
    return forward(**{**named, "hidden_states": with_vectors(named["hidden_states"], offsets)})


def tap_layers(shadow: Any) -> None:
    """Has a shadow give the inputs of its layers, and what comes after the last one, to the taps of a call."""
    layers, decoder = decoder_layers(shadow), decoder_of(shadow)
    for number, layer in enumerate(layers):
        layer.forward = partial(_tapped, number, number + 1 == len(layers), layer.forward)
    decoder.forward = partial(_tapped_end, decoder.forward)


def _tapped(number: int, is_last: bool, forward: Callable[..., Any], *inputs: Tensor, **named: Any) -> Any:
    call = current_call.get()
    if call is None or call.taps is None:
        return forward(*inputs, **named)
    call.taps.keep(number, _rows_of(inputs[0] if inputs else named["hidden_states"], call))
    out = forward(*inputs, **named)
    if is_last:
        call.taps.keep(number + 1, _rows_of(out if isinstance(out, Tensor) else out[0], call))
    return out


def _tapped_end(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    out, call = forward(*inputs, **named), current_call.get()
    if call is not None and call.taps is not None:
        call.taps.keep("last", _rows_of(out[0], call))
    return out


def _rows_of(hidden: Tensor, call: OurCall) -> Tensor:
    """A layer's rows, text by text: of ``[B, N, d]`` or ``[B, N, streams, d]``, or ``[streams, B, N, d]``."""
    if hidden.dim() == 4 and hidden.shape[1] != call.seen.shape[1]:
        return hidden.flatten(1, 2).transpose(0, 1)
    return hidden.flatten(0, 1)


# ---- a shadow ----

_ATOMS = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Tensor, nn.Parameter})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def shadow_of(model: Any) -> Any:
    """The shadow, in eval mode. Tensors, and the dictionaries of parameters and hooks, are the model's own."""
    return _Shadows()(model)


class _Shadows:
    """Shadows by the objects that they stand for."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def __call__(self, model: Any) -> Any:
        compiled = model if hasattr(model, "_orig_mod") else None
        modules = [
            part for part in model.modules() if part is not compiled and not isinstance(part, torch.jit.ScriptModule)
        ]
        self._known = {id(part): object.__new__(type(part)) for part in modules}
        for part in modules:
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
        moved = [*map(self._of_cell, cells), *map(self._of, (*defaults, *named.values()))]
        if not any(map(is_not, moved, (*cells, *defaults, *named.values()))):
            return function
        closure, moved = tuple(moved[: len(cells)]), moved[len(cells) :]
        arguments = function.__globals__, function.__name__, tuple(moved[: len(defaults)]), closure
        made = self._known[id(function)] = FunctionType(function.__code__, *arguments)
        made.__kwdefaults__ = dict(zip(named, moved[len(defaults) :], strict=True))
        return made

    def _of_cell(self, cell: CellType) -> CellType:
        try:
            moved = self._of(cell.cell_contents)
        except ValueError:  # empty
            return cell
        return cell if moved is cell.cell_contents else CellType(moved)

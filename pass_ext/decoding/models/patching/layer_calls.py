"""``layer_calls``: inside a context a model's decoder layers compute few rows by two ops around their attention,
``layer_before_attention`` and ``layer_after_attention``, or on the CPU all of them by one, ``layer_stack``.

A layer is taken apart by the names of its parts, and believed by its numbers: in its first call of few rows these are computed
both ways, and only if the ops give the same bits for queries, keys, values and output do they compute the layer from then on.
On a GPU some rows of the prompt are, however many it has: a step that compares would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.cache_name import given_cache
from pass_ext.decoding.models.packed import Attend
from pass_ext.decoding.models.patching.few_rows import are_few, is_autocast_enabled, most_few_rows
from pass_ext.decoding.models.patching.layer_adapters import WITHOUT_ADAPTERS, adapting
from pass_ext.decoding.models.patching.layer_parts import LayerParts, parts_of
from pass_ext.decoding.models.patching.layer_stack import LayerStack
from pass_ext.decoding.models.patching.row_attention import OurCall, attending, current_call, is_being_recorded
from pass_ext.decoding.models.slots import CallSlots
from pass_ext.ops import layer as registration  # noqa: F401

_before = torch.ops.pass_ext.layer_before_attention.default
_after = torch.ops.pass_ext.layer_after_attention.default
_COMPARED = 8  # rows of more than
_MOST_COMPARED = 64
_ELSEWHERE = 1 << 20  # positions


@contextmanager
def layer_calls(module: nn.Module) -> Iterator[LayerStack]:
    """Replaces the forward of every decoder layer that can be taken apart, and restores it at the end, also after an error.

    Layers with hooks on their parts, or with parts of unknown types (adapters, quantised weights), stay as they are; all layers
    do while torch has hooks for every module. Calls outside a generation, with many rows, that record gradients or are compiled
    compute as before; so do all calls of a layer whose weights are replaced meanwhile.
    """
    changed: list[nn.Module] = []
    stack = LayerStack()
    try:
        if not (is_autocast_enabled() or nn.modules.module._has_any_global_hook()):
            for layer in list(module.modules()):
                parts = parts_of(layer)
                if parts is None:
                    continue
                known = _Layer(parts)
                layer.forward = _forward(layer, known, stack)
                stack.add(layer, known)
                changed.append(layer)
        yield stack
    finally:
        for layer in changed:
            del layer.forward


class _Layer:
    """A layer's parts, and what its first call showed."""

    def __init__(self, parts: LayerParts) -> None:
        self.parts = parts
        self.is_right: bool | None = None  # None: not yet called
        self.rotates = True
        self.attention: dict[str, Any] = {}  # options of attend
        self.returns_tuple = False

    def before(
        self, rows: Tensor, cos: Tensor | None, sin: Tensor | None, adapters: tuple[Any, ...] = WITHOUT_ADAPTERS
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors, numbers = self.parts.before
        q, k, v = _before(rows, *tensors, cos, sin, *numbers, *adapters)
        return q, k, v

    def after(self, attended: Tensor, rows: Tensor, adapters: tuple[Any, ...] = WITHOUT_ADAPTERS) -> Tensor:
        out: Tensor = _after(attended.view(len(rows), -1), rows, *self.parts.after, *adapters)
        return out


def _forward(layer: nn.Module, known: _Layer, stack: LayerStack) -> Callable[..., Any]:
    original: Callable[..., Any] = type(layer).forward.__get__(layer)
    dtype, parts = known.parts.dtype, known.parts

    def forward(hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(hidden_states, *others, **named)
        call = current_call()
        rotation: Any = named.get("position_embeddings")
        if call is None or call.is_compiled:
            return original(hidden_states, *others, **named)
        if parts.layer and stack.has_result(hidden_states):
            return (hidden_states,) if known.returns_tuple else hidden_states
        takes = _is_pair(rotation) and not (
            known.is_right is False
            or others
            or hidden_states.dim() != 3
            or hidden_states.shape[0] != 1
            or hidden_states.dtype is not dtype
            or torch.is_grad_enabled()
            or given_cache(named) is not None
        )
        if takes and known.is_right is None and parts.are_current() and _may_compare(hidden_states, call):
            _compare(original, known, call, hidden_states, named)
        is_ours = takes and bool(known.is_right) and _are_few(hidden_states, call)
        if is_ours and parts.layer == 0:
            out = stack.run_first(call, hidden_states, rotation)
            if out is not None:
                return (out,) if known.returns_tuple else out
        given = hidden_states
        if call.slots is not None and call.slots.offsets is not None:
            hidden_states = hidden_states + call.slots.offsets[parts.layer]
        if not is_ours or not parts.are_current():
            return original(hidden_states, *others, **named)
        rows, cos, sin = hidden_states[0], rotation[0][0], rotation[1][0]
        halves = _halves(stack, call.slots, parts)
        if halves is None:
            result = original(hidden_states, **named)
            out = result[0] if isinstance(result, tuple) else result
        else:
            cos, sin = (cos, sin) if known.rotates else (None, None)
            q, k, v = known.before(rows, cos, sin, halves[0])
            out = known.after(call.attend(parts.layer, q, k, v, **known.attention), rows, halves[1])[None]
            result = (out,) if known.returns_tuple else out
        stack.saw(call, parts.layer, given, rotation, out)
        return result

    forward.layer_call = known  # type: ignore[attr-defined]
    return forward


def _halves(
    stack: LayerStack, slots: CallSlots | None, parts: LayerParts
) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """The adapters of a call's rows as both ops of a layer take them; None if they cannot."""
    if slots is None or slots.adapters is None:
        return WITHOUT_ADAPTERS, WITHOUT_ADAPTERS
    halves = stack.halves_for(slots.adapters, parts)
    return None if halves is None else (halves[0].of_rows(slots.ids), halves[1].of_rows(slots.ids))


def _is_pair(rotation: Any) -> TypeGuard[tuple[Tensor, Tensor]]:
    """True for cosines and sines."""
    return isinstance(rotation, tuple) and len(rotation) == 2


def _are_few(hidden_states: Tensor, call: OurCall) -> bool:
    rows, most = hidden_states.shape[1], most_few_rows(hidden_states.dtype, hidden_states.is_cpu)
    return rows > 0 and are_few(rows, most, call.attend)


def _may_compare(hidden_states: Tensor, call: OurCall) -> bool:
    """True for few rows, and on a GPU for any number, unless a graph is being recorded, which cannot read them."""
    is_any = hidden_states.is_cuda and hidden_states.shape[1] > 0
    return (is_any or _are_few(hidden_states, call)) and not is_being_recorded(hidden_states)


def _no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Stands for attention where a layer is called to be compared alone, and nothing may be kept of its keys and values."""
    return q.contiguous() if q.shape[-1] == v.shape[-1] else q.new_ones(*q.shape[:2], v.shape[-1])


def _some_rows(hidden_states: Tensor, named: dict[str, Any], count: int) -> tuple[Tensor, dict[str, Any]]:
    """The first ``count`` rows of a call, and its arguments for them. Positions are others than those that the rotation stands
    for: the ops know the rotation alone, so a layer that computes with positions too must differ."""
    rows = hidden_states.shape[1]
    cos, sin = named["position_embeddings"]
    named = named | {"position_embeddings": (cos[:, :count], sin[:, :count])}
    for name in ("position_ids", "cache_position"):
        value = named.get(name)
        if isinstance(value, Tensor) and value.shape[-1:] == (rows,):
            named[name] = value[..., :count] + _ELSEWHERE
    return hidden_states[:, :count], named


def _compare(
    original: Callable[..., Any], known: _Layer, call: OurCall, hidden_states: Tensor, named: dict[str, Any]
) -> None:
    """Calls the layer as it is, without attention and adapters, and computes the same by the ops. Of many rows some; a layer
    that cannot be called with those is compared in a call of few."""
    rows = hidden_states.shape[1]
    is_cut = rows > _MOST_COMPARED
    if any(part.dim() != 3 or part.shape[:2] != (1, rows) for part in named["position_embeddings"]):
        known.is_right = False
        return
    hidden_states, named = _some_rows(hidden_states, named, _COMPARED if is_cut else rows)
    cos, sin = named["position_embeddings"]
    seen: list[tuple[int, tuple[Tensor, ...], Tensor, dict[str, Any]]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = _no_attention(layer, q, k, v)
        seen.append((layer, (q, k, v), out, options))
        return out

    recording: Attend = attend
    try:
        with attending(call, recording), adapting(None):
            result = original(hidden_states, **named)
    except Exception:  # the layer takes no such rows; what is wrong with the call itself is said when it runs
        known.is_right = None if is_cut else False
        return
    out = result[0] if isinstance(result, tuple) and len(result) == 1 else result
    if len(seen) != 1 or seen[0][0] != known.parts.layer or not isinstance(out, Tensor):
        known.is_right = False
        return
    _, inputs, attended, options = seen[0]
    few = hidden_states[0]
    for rotates in (True, False):
        try:
            ours = known.before(few, *((cos[0], sin[0]) if rotates else (None, None)))
            is_same = all(map(torch.equal, ours, inputs)) and torch.equal(known.after(attended, few)[None], out)
        except RuntimeError:  # the op refuses shapes that these parts do not have
            is_same = False
        if is_same:
            known.attention, known.returns_tuple, known.rotates = options, isinstance(result, tuple), rotates
            known.is_right = True  # last: other threads read the others then
            return
    known.is_right = False

"""``LayerStack``: a model's decoder layers as one call of ``layer_stack``, once a call has shown that nothing lies between
them.

In such a call each layer, computed alone, was given the very tensor that the layer before it returned. From then on the first
layer computes all, and the others pass its result on; where layers have several rotary embeddings, of which the first layer
gets one, direct_call.py computes all. Adapters of look-ahead slots are computed in it too where every layer has some of the
same linear layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import is_
from threading import local
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.packed import Attend
from pass_ext.decoding.models.patching.few_rows import are_few, most_few_rows
from pass_ext.decoding.models.patching.layer_adapters import PLACES, HalfAdapters, halves_of
from pass_ext.decoding.models.patching.layer_parts import LayerParts
from pass_ext.decoding.models.patching.row_attention import OurCall
from pass_ext.decoding.models.slots import CallSlots, PlacedAdapters
from pass_ext.ops.layer import PackedLayers, adapter_list

_stack = torch.ops.pass_ext.layer_stack.default


class KnownLayer(Protocol):
    """A layer's parts, and what its first call showed."""

    parts: LayerParts
    is_right: bool | None
    rotates: bool
    attention: dict[str, Any]


class _Plan(NamedTuple):
    """What ``layer_stack`` needs of the layers, in the order of its arguments."""

    weights: list[Tensor]
    parts: int
    rotates: list[int]
    windows: list[int]
    numbers: tuple[Any, ...]
    """Head size, eps, form, activation, scale, attention's scale and softcap."""
    key_heads: int
    rotations: list[int]
    """The rotary embedding that each layer is given, by its number."""
    unchanged: _Unchanged


class _Unchanged:
    """Whether layers still compute what they did: no further hooks, and all forwards and weights the same objects."""

    def __init__(self, layers: list[tuple[nn.Module, KnownLayer]]) -> None:
        entries = [(layer.__dict__, "forward", layer.__dict__.get("forward")) for layer, _ in layers]
        entries += [source for _, known in layers for source in known.parts.sources]
        self._dictionaries, self._names, self._values = zip(*entries, strict=True)
        self._hooks = [layer._forward_hooks for layer, _ in layers]
        self._pre_hooks = [layer._forward_pre_hooks for layer, _ in layers]

    def __bool__(self) -> bool:
        if any(self._hooks) or not all(map(is_, map(dict.get, self._dictionaries, self._names), self._values)):
            return False
        return all(hasattr(hook, "adds_offsets") for hooks in self._pre_hooks if hooks for hook in hooks.values())


def found_in(attend: Attend, key: object, look: Callable[[], bool]) -> bool:
    """What ``look`` finds out about the model in the call that attends so; found once where no code runs between calls
    that could change it."""
    found: dict[object, bool] | None = getattr(attend, "found", None)
    if found is None:
        return look()
    if key not in found:
        found[key] = look()
    return found[key]


class _AdapterArguments(NamedTuple):
    """Adapters as ``layer_stack`` takes them."""

    tensors: list[Tensor]
    adapted: int
    scale: float


_NO_ADAPTERS = _AdapterArguments([], 0, 1.0)


class LayerEnds(NamedTuple):
    """What ``layer_stack`` computes behind the layers; all None: nothing."""

    final_norm: Tensor | None = None
    head: Tensor | None = None
    wanted: Tensor | None = None


class LayerStack:
    """The layers of one model that ``layer_calls`` replaces."""

    def __init__(self) -> None:
        self._layers: list[tuple[nn.Module, KnownLayer]] = []
        self._in_order = True
        self._plans: dict[int, _Plan | None] = {}
        self._packed: dict[int, PackedLayers] = {}
        self._last_adapters: tuple[PlacedAdapters, int, _AdapterArguments | None] | None = None
        self._last_halves: tuple[PlacedAdapters, dict[int, tuple[HalfAdapters, HalfAdapters] | None]] | None = None
        self._of_thread = local()

    @property
    def ends(self) -> tuple[Tensor, list[Any], Tensor] | None:
        """The first layer's input, the rotary embeddings and the last layer's output, in this thread's last run."""
        return getattr(self._of_thread, "ends", None)

    def norm_form(self, layers: int | None) -> tuple[float, int] | None:
        """eps and form of the layers' norms, if a call has shown that so many layers can be one call; else None."""
        plan = None if layers is None else self._plans.get(layers)
        return None if plan is None else plan.numbers[1:3]

    def can_run(self, attend: Attend, layers: int | None, rows: Tensor) -> bool:
        """True if so many layers can be one call for rows ``[N, d]`` like these, which attend so."""
        plan = None if layers is None else self._plans.get(layers)
        return (
            plan is not None
            and len(rows) > 0
            and are_few(len(rows), most_few_rows(rows.dtype, rows.is_cpu), attend)
            and rows.dtype is plan.weights[0].dtype
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )

    def add(self, layer: nn.Module, known: KnownLayer) -> None:
        """Adds a layer; all must come, in the order of their indices."""
        self._in_order = self._in_order and known.parts.layer == len(self._layers)
        self._layers.append((layer, known))

    def end(self) -> None:
        """Behind the last of the generations that share it: lets go of their calls and adapters, and of packed weights, which
        Python's collector cannot see."""
        self._of_thread = local()
        self._packed.clear()
        self._last_adapters = self._last_halves = None

    def has_result(self, hidden_states: Tensor) -> bool:
        """True if the first layer has computed all layers, and this is its result."""
        return getattr(self._of_thread, "result", None) is hidden_states

    def run_first(self, call: OurCall, hidden_states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor | None:
        """The first layer's call: computes all layers ``[1, N, d]``, if that is known to be right; else None."""
        self._of_thread.result = None
        plan = None if call.layers is None else self._plans.get(call.layers)
        if plan is None or max(plan.rotations) != 1 or not self.can_run(call.attend, call.layers, hidden_states[0]):
            return None
        cos, sin = rotation
        rows = hidden_states[0]
        out = self.run(call.attend, call.layers, rows, cos[0], sin[0], None, call.slots, LayerEnds())
        if out is None:
            return None
        result = self._of_thread.result = out[None]
        self._of_thread.ends = hidden_states, [rotation], result
        return result

    def run(
        self,
        attend: Attend,
        layers: int | None,
        rows: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        slots: CallSlots | None,
        ends: LayerEnds,
    ) -> Tensor | None:
        """``layer_stack`` on rows that ``can_run`` takes; None if the caches or the adapters do not fit, or a layer has
        changed."""
        plan = None if layers is None else self._plans.get(layers)
        placed = None if slots is None else slots.adapters
        added = _NO_ADAPTERS if placed is None or plan is None else self._adapters_for(placed, plan)
        if added is None:
            return None
        step = getattr(attend, "of_all_layers", None)
        if plan is None or step is None or not found_in(attend, plan.unchanged, plan.unchanged.__bool__):
            return None
        caches = step(layers, rows, plan.key_heads, plan.numbers[0])
        if caches is None:
            return None
        arguments = (
            plan.parts, *caches, cos, sin, positions, plan.rotates, plan.windows, None if slots is None else slots.ids,
            None if slots is None else slots.deep, *added, *ends, *plan.numbers,
        )  # fmt: skip
        results = None
        with suppress(RuntimeError):
            results = _stack(rows, [self._packed_weights(plan).key], *arguments)
        if results is None:
            # A weight whose data was replaced lies elsewhere now, where the op finds it in the list. Anything else is wrong
            # there too, and is said there.
            self._packed.pop(len(plan.windows), None)
            results = _stack(rows, plan.weights, *arguments)
        out, new = results
        attend.take(new)  # type: ignore[attr-defined]
        return out

    def _packed_weights(self, plan: _Plan) -> PackedLayers:
        """Packs the weights at the first call of the generations that share them."""
        layers = len(plan.windows)
        packed = self._packed.get(layers)
        if packed is None:
            packed = self._packed[layers] = PackedLayers(plan.weights, plan.parts, plan.numbers[0])
        return packed

    def _adapters_for(self, placed: PlacedAdapters, plan: _Plan) -> _AdapterArguments | None:
        """The adapters as ``layer_stack`` takes them; None if it cannot."""
        known, layers = self._last_adapters, len(plan.windows)
        if known is None or known[0] is not placed or known[1] != layers:
            known = self._last_adapters = (placed, layers, _adapter_arguments(placed, layers, plan))
        return known[2]

    def halves_for(self, placed: PlacedAdapters, parts: LayerParts) -> tuple[HalfAdapters, HalfAdapters] | None:
        """The adapters of one layer as the ops around its attention take them; None if they cannot."""
        known = self._last_halves
        if known is None or known[0] is not placed:
            known = self._last_halves = (placed, {})
        if parts.layer not in known[1]:
            known[1][parts.layer] = halves_of(placed, parts.layer, parts.dtype)
        return known[1][parts.layer]

    def saw(self, call: OurCall, index: int, hidden_states: Tensor, rotation: Any, out: Tensor) -> None:
        """Notes that a layer was computed alone: its input, before offsets, and its output."""
        state = self._of_thread
        if index == 0:
            state.call, state.first, state.rotations, state.numbers, state.follows = call, hidden_states, [], [], True
        elif getattr(state, "call", None) is call:
            state.follows &= hidden_states is state.last and index == state.index + 1
        if getattr(state, "call", None) is not call:
            return
        if not any(rotation is known for known in state.rotations):
            state.rotations.append(rotation)
        state.numbers.append(1 + next(i for i, known in enumerate(state.rotations) if known is rotation))
        state.index, state.last = index, out
        if call.layers == index + 1:
            if state.follows and self._in_order:
                if call.layers not in self._plans:
                    self._plans[call.layers] = _plan_of(self._layers[: call.layers], state.numbers)
                plan = self._plans[call.layers]
                is_as_planned = plan is not None and plan.rotations == state.numbers
                state.ends = (state.first, state.rotations, out) if is_as_planned else None
            state.call = state.first = state.rotations = state.last = None


def _plan_of(layers: list[tuple[nn.Module, KnownLayer]], rotations: list[int]) -> _Plan | None:
    """The arguments for these layers, with the numbers of the rotary embeddings that they got; None if the layers differ in
    what ``layer_stack`` takes once."""
    weights: list[Tensor] = []
    alike = set()
    for _, known in layers:
        (before, (head_dim, eps, form)), after = known.parts.before, known.parts.after
        tensors = (*before, *after[:-4])
        weights += [tensor for tensor in tensors if tensor is not None]
        scale = known.attention.get("scale")
        alike.add(
            (
                sum(1 << i for i, tensor in enumerate(tensors) if tensor is not None),
                (head_dim, eps, form, *after[-2:], head_dim**-0.5 if scale is None else scale,
                 known.attention.get("softcap", 0.0)),
                after[-4:-2] == (eps, form),
                bool(known.is_right),
            )
        )  # fmt: skip
    if len(alike) != 1:
        return None
    parts, numbers, *are_right = alike.pop()
    if not all(are_right) or not all(weight.is_cpu for weight in weights):  # the op is for the CPU
        return None
    windows = [known.attention.get("window", -1) for _, known in layers]
    key_heads = layers[0][1].parts.before[0][3].shape[0] // numbers[0]
    rotates = [number if known.rotates else 0 for (_, known), number in zip(layers, rotations, strict=True)]
    return _Plan(weights, parts, rotates, windows, numbers, key_heads, rotations, _Unchanged(layers))


def _adapter_arguments(placed: PlacedAdapters, layers: int, plan: _Plan) -> _AdapterArguments | None:
    """The adapters of the first layers; None if these have not all the same, or joined ones."""
    named: dict[str, tuple[Tensor, Tensor]] = {}
    for place, (down, up) in placed.stacks.items():
        if len(down) < layers or place not in PLACES or down.dtype is not plan.weights[0].dtype:
            return None
        named[PLACES[place]] = down[:layers], up[:layers]
    *_, scale, _, _ = plan.numbers
    if not named or (scale != 1.0 and {"o", "down"} & set(named)):
        return None
    adapted, tensors = adapter_list("layer_stack", named)
    return _AdapterArguments(tensors, adapted, placed.scale)

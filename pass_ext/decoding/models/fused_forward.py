"""``FusedForward``: a transformers model's forward made of our ops.

    logits = head(norm(layers(scale * rows)))  / divisor, capped

On the CPU the layers are one call of ``layer_stack``, with norm and head where these are known; else each layer is
``layer_before_attention`` and ``layer_after_attention`` around its attention. It computes few rows. ``parts.py`` finds the
parts, ``backend.py`` compares the numbers with the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.module_ops import is_autocast_enabled
from pass_ext.decoding.models.packed import StepAttend
from pass_ext.decoding.models.parts import ModelPlan, StackArguments, decoder_of, text_parts
from pass_ext.decoding.models.rotation_table import RotationTable
from pass_ext.decoding.models.slots import CallSlots, Pair, PlacedAdapters
from pass_ext.ops.layer import ADAPTED_AFTER, ADAPTED_BEFORE, PackedLayers, adapter_list

_stack = torch.ops.pass_ext.layer_stack.default
_before = torch.ops.pass_ext.layer_before_attention.default
_after = torch.ops.pass_ext.layer_after_attention.default

End = Callable[[Tensor, bool], Tensor]


def is_hooked(modules: Iterable[nn.Module]) -> bool:
    """True if code of others runs in calls of the modules."""
    return _is_watched() or any(_hooks_of(modules))


def _hooks_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The modules' dictionaries of hooks, which are empty as long as nobody registers one."""
    return [hooks for part in modules for hooks in (part._forward_hooks, part._forward_pre_hooks)]


def _is_watched() -> bool:
    return nn.modules.module._has_any_global_hook() or is_autocast_enabled()


class FusedForward:
    """The forward of one model, for the calls of one generation.

    Args:
        plan: the model's parts.
        model: the model itself.
        norm, head: the model's own, for a plan without these: ``[1, R, d]`` and whether the call is batch-invariant ->
            ``[1, R, d]``, and logits ``[1, R, V]``.
    """

    def __init__(self, plan: ModelPlan, model: Any, norm: End, head: End) -> None:
        self.plan, self._norm, self._head = plan, norm, head
        self._rotary: Any = decoder_of(model).rotary_emb
        self._rotations = RotationTable(self._rotary)
        tensors = (*plan.layers[0].before, *plan.layers[0].after)
        self._dtype = next(each.dtype for each in tensors if each is not None and each.is_floating_point())
        parts = (each for layer in plan.layers for each in (*layer.before, *layer.after) if each is not None)
        self.is_packed = not any(each.dim() > 1 and each.is_floating_point() for each in parts)
        """True if all weights of layers are packed: their product is the same op for any number of rows."""
        self._packed: PackedLayers | None = None
        self._adapters: tuple[PlacedAdapters, Added | None, list[tuple[Added, Added]] | None] | None = None
        modules = text_parts(model)
        self._hooks = _hooks_of(modules)
        parameters = [(part._parameters, name) for part in modules for name in part._parameters]
        self._parameters, self._names = zip(*parameters, strict=True)
        self._values = [found[name] for found, name in parameters]

    def is_current(self) -> bool:
        """True if no hook and no other parameter has come to the model since."""
        if _is_watched() or any(self._hooks):
            return False
        return all(map(is_, map(dict.get, self._parameters, self._names), self._values))

    def takes(self, rows: Tensor) -> bool:
        """True for rows of the dtype of the layers, which need no gradients."""
        return len(rows) > 0 and rows.dtype is self._dtype and not torch.is_grad_enabled()

    def __call__(
        self,
        rows: Tensor,
        positions: Tensor,
        attend: StepAttend,
        wanted: Tensor | None,
        slots: CallSlots | None,
        *,
        ends_apart: bool = False,
    ) -> Tensor | None:
        """Logits ``[N or len(wanted), V]``; None if it cannot add these adapters. ends_apart: norm and head are the model's."""
        plan, stack = self.plan, self.plan.stack
        if plan.rows_scale != 1.0:
            rows = rows * plan.rows_scale
        has_ends = plan.norm is not None and not ends_apart
        stacked, halves = self._adapters_for(slots)
        out = None
        if stack is not None and stacked is not None:
            ends = (plan.norm, plan.head, wanted) if has_ends else (None, None, None)
            out = self._stacked(stack, rows, positions, attend, slots, (*stacked, *ends))
            if out is not None and has_ends:
                return self._scaled(out)
        if out is None and halves is not None:
            out = self._layers(rows, positions, attend, slots, halves)
        if out is None:
            return None
        hidden = out if wanted is None else out[wanted]
        normed = self._norm(hidden[None], attend.batch_invariant)
        return self._scaled(self._head(normed, attend.batch_invariant)[0])

    def _scaled(self, logits: Tensor) -> Tensor:
        """What a model does to its logits after its head."""
        if self.plan.divisor != 1.0:
            logits = logits / self.plan.divisor
        if self.plan.cap:
            logits = torch.tanh(logits / self.plan.cap) * self.plan.cap
        return logits

    def _stacked(
        self,
        stack: StackArguments,
        rows: Tensor,
        positions: Tensor,
        attend: StepAttend,
        slots: CallSlots | None,
        adapters_and_ends: tuple[Any, ...],
    ) -> Tensor | None:
        """All layers in one call, and final norm and head of the rows wanted; None if the op does not take these caches."""
        caches = attend.of_all_layers(len(self.plan.layers), rows, stack.key_heads, stack.numbers[0])
        if caches is None:
            return None
        (cos, sin), at = self._rotations.at(rows, positions, self._rotated)
        ids, deep = (None, None) if slots is None else (slots.ids, slots.deep)
        taps, layers = attend.taps, len(self.plan.layers)
        tapped = [] if taps is None else sorted({layers if place == "last" else place for place in taps.places})
        places = at, self.plan.rotates, stack.windows
        arguments = stack.parts, *caches, cos, sin, *places, ids, deep, *adapters_and_ends, tapped
        if self._packed is None:
            self._packed = PackedLayers(stack.weights, stack.parts, stack.numbers[0])
        try:
            out, new, states = _stack(rows, None, [self._packed.key], *arguments, *stack.numbers)
        except RuntimeError:
            # A weight whose data was replaced lies elsewhere now, where the op finds it in the list. Anything else is wrong
            # there too, and is said there.
            self._packed = None
            out, new, states = _stack(rows, None, stack.weights, *arguments, *stack.numbers)
        attend.take(new)
        for place, state in zip(tapped, states, strict=True):
            self._keep(attend, place, state)
        return out

    def _layers(
        self,
        rows: Tensor,
        positions: Tensor,
        attend: StepAttend,
        slots: CallSlots | None,
        halves: Sequence[tuple[Added, Added]],
    ) -> Tensor:
        """Layer by layer."""
        plan = self.plan
        ids, offsets = (None, None) if slots is None else (slots.ids, slots.offsets)
        cos, sin = self._rotated(rows, positions)
        if len(plan.kinds) == 1:
            cos, sin = cos[None], sin[None]
        for number, (parts, kind, added) in enumerate(zip(plan.layers, plan.rotates, halves, strict=True)):
            if offsets is not None:
                rows = rows + offsets[number]
            self._keep(attend, number, rows)
            rotation = (cos[kind - 1], sin[kind - 1]) if kind else (None, None)
            before, after = ((ids if half[1] else None, *half) for half in added)
            q, k, v = _before(rows, *parts.before, *rotation, parts.head_dim, parts.eps, parts.form, *before)
            attended = attend(number, q, k, v, **plan.attention[number])
            options = parts.eps, parts.form, parts.activation, parts.scale
            rows = _after(attended.view(len(rows), -1), rows, *parts.after, *options, *after)
        self._keep(attend, len(plan.layers), rows)
        return rows

    def _keep(self, attend: StepAttend, place: int, rows: Tensor) -> None:
        """Gives the rows in front of a layer to whoever wants hidden states; those after the last one also after the norm."""
        taps = attend.taps
        if taps is None:
            return
        if place in taps.places:
            taps.take(place, rows)
        if place == len(self.plan.layers) and "last" in taps.places:
            taps.take("last", self._norm(rows[None], attend.batch_invariant)[0])

    def _rotated(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at these positions: ``[N, D']``, or ``[K, N, D']`` of K kinds of layers."""
        rotations = [self._of_kind(rows[None], positions, kind) for kind in self.plan.kinds]
        if len(rotations) == 1:
            cos, sin = rotations[0]
            return cos[0], sin[0]
        all_cos, all_sin = zip(*rotations, strict=True)
        return torch.cat(all_cos), torch.cat(all_sin)

    def _of_kind(self, rows: Tensor, positions: Tensor, kind: Sequence[str]) -> tuple[Tensor, Tensor]:
        """``[1, N, D']`` for the layers of a kind."""
        try:
            return self._rotary(rows, positions[None], *kind)
        except IndexError:  # transformers 4's M-RoPE takes and gives three axes, which are equal after a prompt
            cos, sin = self._rotary(rows, positions.expand(3, 1, -1), *kind)
            return cos.flatten(0, -3)[:1], sin.flatten(0, -3)[:1]

    def _adapters_for(self, slots: CallSlots | None) -> tuple[Added | None, list[tuple[Added, Added]] | None]:
        """The adapters of a call as ``layer_stack`` takes them, and as the ops of each layer do; None where they cannot."""
        placed = None if slots is None else slots.adapters
        if placed is None:
            return _NOTHING, [(_NOTHING, _NOTHING)] * len(self.plan.layers)
        if self._adapters is None or self._adapters[0] is not placed:
            self._adapters = placed, _of_all_layers(placed, self.plan), _of_each_layer(placed, self.plan)
        return self._adapters[1:]


# ---- adapters of look-ahead slots ----

Added = tuple[list[Tensor], int, float]
"""Adapters as an op takes them: tensors, which linear layers have some, and their scale."""
_NOTHING: Added = [], 0, 1.0

_PLACES = {f"self_attn.{name}_proj": name for name in (*ADAPTED_BEFORE, "o")}
_PLACES |= {f"mlp.{name}_proj": name for name in ADAPTED_AFTER[1:]}
"""A linear layer's name in its decoder layer -> its name for the layer ops. Parts of joined layers have none: a call with
adapters of such runs the model as it is."""


def _of_all_layers(placed: PlacedAdapters, plan: ModelPlan) -> Added | None:
    """For all layers in one call; None if these have not all the same adapters, or joined ones."""
    if any(name not in _PLACES or len(down) != len(plan.layers) for name, down, _ in placed.stacks):
        return None
    named = {_PLACES[name]: (down, up) for name, down, up in placed.stacks}
    if plan.layers[0].scale != 1.0 and {"o", "down"} & set(named):
        return None
    return _added("layer_stack", named, placed.scale)


def _of_each_layer(placed: PlacedAdapters, plan: ModelPlan) -> list[tuple[Added, Added]] | None:
    """For the layers' ops, in front of attention and after it; None if these do not know a place."""
    named: list[dict[str, Pair]] = [{} for _ in plan.layers]
    for place, pair in placed.pairs.items():
        number, _, name = place.partition(".")
        if name not in _PLACES:
            return None
        named[int(number)][_PLACES[name]] = pair
    halves = ("layer_before_attention", ADAPTED_BEFORE), ("layer_after_attention", ADAPTED_AFTER)

    def listed(pairs: dict[str, Pair], op: str, names: tuple[str, ...]) -> Added:
        return _added(op, {name: pairs[name] for name in names if name in pairs}, placed.scale)

    return [(listed(pairs, *halves[0]), listed(pairs, *halves[1])) for pairs in named]


def _added(op: str, named: Mapping[str, Pair], scale: float) -> Added:
    adapted, tensors = adapter_list(op, named)
    return (tensors, adapted, scale) if adapted else _NOTHING

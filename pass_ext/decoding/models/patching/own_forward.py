"""``OwnForward``: a transformers model's forward made of our ops.

    logits = head(norm(layers(scale * rows)))  / divisor, capped

On the CPU the layers are one call of ``layer_stack``, with norm and head where these are known; else each layer is
``layer_before_attention`` and ``layer_after_attention`` around its attention. It computes few rows; ``model_plan.py`` finds the
parts, ``comparison.py`` compares the numbers with the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.packed import StepAttend
from pass_ext.decoding.models.patching.few_rows import is_autocast_enabled
from pass_ext.decoding.models.patching.layer_adapters import (
    WITHOUT_ADAPTERS,
    AdapterArguments,
    HalfAdapters,
    halves_of,
    stacked_adapters,
)
from pass_ext.decoding.models.patching.layer_offsets import decoder_of
from pass_ext.decoding.models.patching.model_plan import ModelPlan
from pass_ext.decoding.models.slots import CallSlots, PlacedAdapters
from pass_ext.ops import layer as registration  # noqa: F401
from pass_ext.ops.layer import PackedLayers
from pass_ext.tree import MAX_TREE_NODES

_stack = torch.ops.pass_ext.layer_stack.default
_before = torch.ops.pass_ext.layer_before_attention.default
_after = torch.ops.pass_ext.layer_after_attention.default

_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose frequencies do not depend on the text's length."""

_LONGEST_TABLE = 1 << 20
"""Positions. Behind it, where hardly a text is, rotary embeddings are computed for each call."""


def is_hooked(modules: Iterable[nn.Module]) -> bool:
    """True if code of others runs in calls of the modules."""
    return _is_watched() or any(hooks_of(modules))


def hooks_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The modules' dictionaries of hooks, which are empty as long as nobody registers one."""
    return [hooks for part in modules for hooks in (part._forward_hooks, part._forward_pre_hooks)]


def _is_watched() -> bool:
    return nn.modules.module._has_any_global_hook() or is_autocast_enabled()


class OwnForward:
    """The forward of one model, for the calls of one generation.

    Args:
        plan: the model's parts.
        model: the model itself.
        tail: ``[1, R, d]`` -> logits ``[1, R, V]``, the model's own norm and head, for a plan without these.
    """

    def __init__(self, plan: ModelPlan, model: Any, tail: Callable[[Tensor], Tensor]) -> None:
        self.plan, self._tail = plan, tail
        self._rotary: Any = decoder_of(model).rotary_emb
        types = getattr(self._rotary, "rope_type", None)
        self._is_fixed = set(types.values() if isinstance(types, dict) else [types]) <= _FIXED_ROPES
        self._table: tuple[Tensor, Tensor] | None = None  # cosines and sines by position
        self._packed: PackedLayers | None = None
        self._adapters: tuple[PlacedAdapters, AdapterArguments | None] | None = None
        self._halves: tuple[PlacedAdapters, list[tuple[HalfAdapters, HalfAdapters]] | None] | None = None
        modules = list(model.modules())
        self._hooks = hooks_of(modules)
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
        return len(rows) > 0 and rows.dtype is self.plan.layers[0].dtype and not torch.is_grad_enabled()

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
        """Logits ``[N or len(wanted), V]``; None if it cannot add these adapters. ends_apart: norm and head are ``tail``."""
        plan = self.plan
        if plan.rows_scale != 1.0:
            rows = rows * plan.rows_scale
        ends = None if ends_apart or plan.norm is None else (plan.norm.weight, plan.head, wanted)
        out = self._stacked(rows, positions, attend, slots, ends)
        if out is not None and ends is not None:
            return self._scaled(out)
        if out is None:
            out = self._layers(rows, positions, attend, slots)
        return None if out is None else self._scaled(self._tail((out if wanted is None else out[wanted])[None])[0])

    def _scaled(self, logits: Tensor) -> Tensor:
        """What a model does to its logits behind its head."""
        if self.plan.divisor != 1.0:
            logits = logits / self.plan.divisor
        if self.plan.cap:
            logits = torch.tanh(logits / self.plan.cap) * self.plan.cap
        return logits

    def _stacked(
        self,
        rows: Tensor,
        positions: Tensor,
        attend: StepAttend,
        slots: CallSlots | None,
        ends: tuple[Any, ...] | None,
    ) -> Tensor | None:
        """All layers in one call, and final norm and head of the rows wanted; None where the op cannot."""
        plan, stack = self.plan, self.plan.stack
        if stack is None:
            return None
        placed = None if slots is None else slots.adapters
        added = AdapterArguments() if placed is None else self._adapters_for(placed)
        if added is None:
            return None
        caches = attend.of_all_layers(len(plan.layers), rows, stack.key_heads, stack.numbers[0])
        if caches is None:
            return None
        (cos, sin), at = self._rotations(rows, positions)
        arguments = (
            stack.parts, *caches, cos, sin, at, plan.rotates, stack.windows, None if slots is None else slots.ids,
            None if slots is None else slots.deep, *added, *(ends or (None, None, None)),
            *stack.numbers,
        )  # fmt: skip
        if self._packed is None:
            self._packed = PackedLayers(stack.weights, stack.parts, stack.numbers[0])
        try:
            out, new = _stack(rows, [self._packed.key], *arguments)
        except RuntimeError:
            # A weight whose data was replaced lies elsewhere now, where the op finds it in the list. Anything else is wrong
            # there too, and is said there.
            self._packed = None
            out, new = _stack(rows, stack.weights, *arguments)
        attend.take(new)
        return out

    def _layers(
        self,
        rows: Tensor,
        positions: Tensor,
        attend: StepAttend,
        slots: CallSlots | None,
    ) -> Tensor | None:
        """Layer by layer; None if an op does not know a place of these adapters."""
        plan = self.plan
        placed = None if slots is None else slots.adapters
        halves = None if placed is None else self._halves_for(placed)
        if placed is not None and halves is None:
            return None
        cos, sin = self._rotated(rows, positions)
        if len(plan.kinds) == 1:
            cos, sin = cos[None], sin[None]
        for number, (parts, options, kind) in enumerate(zip(plan.layers, plan.attention, plan.rotates, strict=True)):
            if slots is not None and slots.offsets is not None:
                rows = rows + slots.offsets[number]
            before = after = WITHOUT_ADAPTERS
            if slots is not None and halves is not None:
                before, after = (half.of_rows(slots.ids) for half in halves[number])
            rotation = (cos[kind - 1], sin[kind - 1]) if kind else (None, None)
            tensors, numbers = parts.before
            q, k, v = _before(rows, *tensors, *rotation, *numbers, *before)
            attended = attend(number, q, k, v, **options)
            rows = _after(attended.view(len(rows), -1), rows, *parts.after, *after)
        return rows

    def _rotations(self, rows: Tensor, positions: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Cosines and sines of these positions; or of all, and the positions, where these do not depend on each other."""
        table, length = self._table, int(positions.max()) + 1
        if not self._is_fixed or length > _LONGEST_TABLE:
            return self._rotated(rows, positions), None
        if table is None or table[0].shape[-2] < length:
            longer = torch.arange(max(2 * length, MAX_TREE_NODES), device=rows.device)
            table = self._table = self._rotated(rows, longer)
        return table, positions

    def _rotated(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at these positions: ``[N, D']``, or ``[K, N, D']`` of K kinds of layers."""
        rotations = [self._rotary(rows[None], positions[None], *kind) for kind in self.plan.kinds]
        if len(rotations) == 1:
            cos, sin = rotations[0]
            return cos[0], sin[0]
        all_cos, all_sin = zip(*rotations, strict=True)
        return torch.cat(all_cos), torch.cat(all_sin)

    def _adapters_for(self, placed: PlacedAdapters) -> AdapterArguments | None:
        if self._adapters is None or self._adapters[0] is not placed:
            self._adapters = placed, stacked_adapters(placed, self.plan)
        return self._adapters[1]

    def _halves_for(self, placed: PlacedAdapters) -> list[tuple[HalfAdapters, HalfAdapters]] | None:
        if self._halves is None or self._halves[0] is not placed:
            found = [halves_of(placed, number, parts.dtype) for number, parts in enumerate(self.plan.layers)]
            known = [halves for halves in found if halves is not None]
            self._halves = placed, known if len(known) == len(found) else None
        return self._halves[1]

"""Adapters of look-ahead slots at a model's linear layers: as arguments of the layer ops, and as hooks of a shadow's layers.

The ops do not know adapters of joined linear layers; a call with such runs the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.patching.layer_offsets import decoder_layers
from pass_ext.decoding.models.patching.model_plan import ModelPlan
from pass_ext.decoding.models.patching.shadow import own_hooks
from pass_ext.decoding.models.slots import CallSlots, PlacedAdapters
from pass_ext.modules.slot_adapters import AdapterSize
from pass_ext.ops.layer import ADAPTED_AFTER, ADAPTED_BEFORE, adapter_list

PLACES = {f"self_attn.{name}_proj": name for name in (*ADAPTED_BEFORE, "o")}
PLACES |= {f"mlp.{name}_proj": name for name in ADAPTED_AFTER[1:]}
"""A linear layer's name in its decoder layer -> its name for the layer ops. Parts of joined layers have none."""

# Kind -> the last parts of the names that transformers gives such layers.
KINDS: dict[str, tuple[str, ...]] = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "qkv": ("qkv_proj", "query_key_value", "attn.c_attn"),
    "o": ("o_proj", "out_proj", "self_attn.dense", "attention.dense", "attn.c_proj"),
    "gate": ("gate_proj",),
    "up": ("up_proj", "fc1", "dense_h_to_4h", "mlp.c_fc"),
    "gate_up": ("gate_up_proj",),
    "down": ("down_proj", "fc2", "dense_4h_to_h", "mlp.c_proj"),
}

_current: ContextVar[CallSlots | None] = ContextVar("slots", default=None)


@contextmanager
def adapting(slots: CallSlots | None) -> Iterator[None]:
    """Inside, and in this thread only, linear layers with hooks add the adapters of these slots."""
    token = _current.set(slots)
    try:
        yield
    finally:
        _current.reset(token)


def check_places(model: Any, adapters: PlacedAdapters) -> None:
    """Refuses adapters of linear layers that the model does not have, or has in other sizes."""
    layers = decoder_layers(model)
    for place, (down, up) in adapters.pairs.items():
        sizes, module = (down.shape[2], up.shape[2]), linear_at(layers, place)
        there = None if module is None else sizes_of(module)
        if there != sizes:
            found = "no such layer" if module is None else f"{there}"
            raise ValueError(f"these adapters have one for {place} with (in, out) = {sizes}, the model has {found}")


def add_adapters(shadow: Any, places: Iterable[str]) -> None:
    """Registers hooks of a shadow's own that add ``adapting``'s adapters to the outputs of linear layers."""
    layers = decoder_layers(shadow)
    for place in places:
        module = linear_at(layers, place)
        if module is not None:
            own_hooks(module)
            module.register_forward_hook(_added(place))


def linear_at(layers: nn.ModuleList, place: str) -> nn.Module | None:
    """The module at a place such as "3.self_attn.q_proj"; None: there is none."""
    number, _, name = place.partition(".")
    try:
        return layers[int(number)].get_submodule(name)
    except (AttributeError, IndexError):
        return None


class HalfAdapters(NamedTuple):
    """The adapters of one half of a decoder layer, as its op takes them."""

    tensors: list[Tensor]
    adapted: int
    scale: float

    def of_rows(self, ids: Tensor) -> tuple[Any, ...]:
        """The op's last arguments, for rows with these ids."""
        return (ids, *self) if self.adapted else WITHOUT_ADAPTERS


WITHOUT_ADAPTERS: tuple[Any, ...] = (None, [], 0, 1.0)
"""The last arguments of both layer ops in a call without adapters."""


def halves_of(placed: PlacedAdapters, layer: int, dtype: torch.dtype) -> tuple[HalfAdapters, HalfAdapters] | None:
    """The adapters of a decoder layer in front of its attention and behind it; None if its ops cannot take them."""
    named: dict[str, tuple[Tensor, Tensor]] = {}
    for place, pair in placed.pairs.items():
        number, _, name = place.partition(".")
        if int(number) != layer:
            continue
        if name not in PLACES or pair[0].dtype is not dtype:
            return None
        named[PLACES[name]] = pair

    def half(op: str, names: tuple[str, ...]) -> HalfAdapters:
        adapted, tensors = adapter_list(op, {name: named[name] for name in names if name in named})
        return HalfAdapters(tensors, adapted, placed.scale)

    return half("layer_before_attention", ADAPTED_BEFORE), half("layer_after_attention", ADAPTED_AFTER)


class AdapterArguments(NamedTuple):
    """Adapters as ``layer_stack`` takes them."""

    tensors: Sequence[Tensor] = []
    adapted: int = 0
    scale: float = 1.0


def stacked_adapters(placed: PlacedAdapters, plan: ModelPlan) -> AdapterArguments | None:
    """The adapters of all layers; None if these have not all the same, or joined ones."""
    assert plan.stack is not None
    layers, named = len(plan.layers), dict[str, tuple[Tensor, Tensor]]()
    for place, (down, up) in placed.stacks.items():
        if len(down) < layers or place not in PLACES or down.dtype is not plan.layers[0].dtype:
            return None
        named[PLACES[place]] = down[:layers], up[:layers]
    *_, scale, _, _ = plan.stack.numbers
    if not named or (scale != 1.0 and {"o", "down"} & set(named)):
        return None
    adapted, tensors = adapter_list("layer_stack", named)
    return AdapterArguments(tensors, adapted, placed.scale)


def _added(place: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        slots = _current.get()
        if slots is not None:
            slots.adapt_(place, output, inputs[0])

    return hook


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer; None for any other module."""
    for names in (("in_features", "out_features"), ("nx", "nf")):  # nn.Linear and wrappers of it, Conv1D
        inputs, outputs = (getattr(module, name, None) for name in names)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None


def adapter_sizes(model: Any, ranks: int | Mapping[str, int]) -> dict[str, AdapterSize]:
    """The adapters of a model's linear layers: by one rank for all, or by the ranks of some kinds (``KINDS``).

    The experts of a mixture get none: their rows are not the call's.
    """
    by_kind = dict.fromkeys(KINDS, ranks) if isinstance(ranks, int) else dict(ranks)
    if unknown := sorted(set(by_kind).difference(KINDS)):
        raise ValueError(f"ranks must be of the kinds {', '.join(KINDS)}, got {', '.join(unknown)}")
    sizes: dict[str, AdapterSize] = {}
    for number, layer in enumerate(decoder_layers(model)):
        for name, module in layer.named_modules():
            rank, size = by_kind.get(_kind_of(name) or "", 0), sizes_of(module)
            if rank and size is not None and "experts" not in name.split("."):
                sizes[f"{number}.{name}"] = AdapterSize(*size, rank)
    if not sizes:
        raise ValueError(f"{type(model).__name__} has no linear layer of the kinds {', '.join(by_kind)}")
    return sizes


def _kind_of(name: str) -> str | None:
    for kind, endings in KINDS.items():
        if any(name == ending or name.endswith(f".{ending}") for ending in endings):
            return kind
    return None

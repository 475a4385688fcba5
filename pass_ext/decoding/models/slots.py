"""``PlacedSlots``: the parameters of look-ahead slots as a session holds them, in the dtype and on the device of a model.
``CallSlots``: those of one call, whose rows of slots are known.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.ops import adapter  # noqa: F401, which registers the op

_op = torch.ops.pass_ext.adapter_rows_.default
_kept: MutableMapping[SlotAdapters, tuple[Any, PlacedAdapters]] = WeakKeyDictionary()


class PlacedAdapters(NamedTuple):
    """Copies of adapters in the dtype and on the device of a model."""

    scale: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """Place, such as "3.self_attn.q_proj", -> down ``[K, r, in]`` and up ``[K, r, out]``: layers of ``stacks``."""
    stacks: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({})
    """Place in a layer, such as "self_attn.q_proj", -> down ``[layers, K, r, in]`` and up ``[layers, K, r, out]``. Empty if
    layers differ in places, ranks or sizes; then ``pairs`` are copies of their own."""

    @classmethod
    def shared(cls, adapters: SlotAdapters, slots: int, like: Tensor) -> PlacedAdapters:
        """As ``of``, for readers alone: the same copies until one of the parameters changes. Copying hundreds of small tensors
        takes as long as a step of a small model, and so many new objects make Python look for garbage."""
        parameters = list(adapters.parameters())
        if any(x.is_inference() for x in parameters):  # inference tensors have no version to notice a change by
            return cls.of(adapters, slots, like)
        state = slots, like.dtype, like.device, adapters.scale, [(x.data_ptr(), x._version) for x in parameters]
        known = _kept.get(adapters)
        if known is None or known[0] != state:
            known = _kept[adapters] = (state, cls.of(adapters, slots, like))
        return known[1]

    @classmethod
    def of(cls, adapters: SlotAdapters, slots: int, like: Tensor) -> PlacedAdapters:
        """Copies of the adapters of the first ``slots`` slots, as ``like``."""
        layers: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
        for place, down, up in adapters.pairs(slots):
            number, _, name = place.partition(".")
            layers.setdefault(name, {})[int(number)] = (down, up)
        count = max((number for of_name in layers.values() for number in of_name), default=-1) + 1
        if all(len(of_name) == count and len(_sizes(of_name)) == 1 for of_name in layers.values()):
            stacks = {}
            for name, of_name in layers.items():
                downs, ups = zip(*(of_name[i] for i in range(count)), strict=True)
                stacks[name] = _stacked(downs, like), _stacked(ups, like)
            pairs = {f"{i}.{name}": (down[i], up[i]) for name, (down, up) in stacks.items() for i in range(count)}
            return cls(adapters.scale, pairs, stacks)
        pairs = {
            f"{number}.{name}": (_stacked([down], like)[0], _stacked([up], like)[0])
            for name, of_name in layers.items()
            for number, (down, up) in of_name.items()
        }
        return cls(adapters.scale, pairs, {})

    def has_shapes_of(self, other: PlacedAdapters) -> bool:
        """True if ``copy_`` can take the numbers of the other."""
        return self.scale == other.scale and _shapes(self) == _shapes(other)

    def copy_(self, other: PlacedAdapters) -> None:
        """Takes the other's numbers in place: recorded calls read the same memory."""
        for place, pair in self.pairs.items():
            for mine, theirs in zip(pair, other.pairs[place], strict=True):
                mine.copy_(theirs)


def _stacked(parameters: Sequence[Tensor], like: Tensor) -> Tensor:
    """Contiguous copies, which the op of all layers wants."""
    out = like.new_empty((len(parameters), *parameters[0].shape))
    for copy, parameter in zip(out, parameters, strict=True):
        copy.copy_(parameter.detach())
    return out


def _sizes(layers: Mapping[int, tuple[Tensor, Tensor]]) -> set[tuple[torch.Size, torch.Size]]:
    return {(down.shape, up.shape) for down, up in layers.values()}


def _shapes(adapters: PlacedAdapters) -> dict[str, list[torch.Size]]:
    return {place: [tensor.shape for tensor in pair] for place, pair in adapters.pairs.items()}


class PlacedSlots:
    """Copies of the parameters of look-ahead slots.

    Args:
        weight: ``[L, d]``, their input embeddings.
        deep: ``[layers, L, d]``, vectors that they add to the input of every layer; None: none.
        adapters: of the linear layers, for their rows; None: none.
    """

    def __init__(self, weight: Tensor, deep: Tensor | None = None, adapters: PlacedAdapters | None = None) -> None:
        self.weight, self.deep, self.adapters = weight, deep, adapters

    @classmethod
    def of(cls, lookahead: LookaheadEmbedding, count: int, like: Tensor) -> PlacedSlots:
        """The first ``count`` slots, as ``like``."""
        deep, adapters = lookahead.deep, lookahead.adapters
        place = PlacedAdapters.shared if like.is_cpu else PlacedAdapters.of
        return cls(
            lookahead.weight[:count].detach().to(like, copy=True),
            None if deep is None else deep[:, :count].detach().to(like, copy=True),
            None if adapters is None else place(adapters, count, like),
        )

    def copy_(self, other: PlacedSlots) -> None:
        """Takes the other's numbers in place: recorded calls read the same memory. Refuses other shapes."""
        mine, theirs = self.adapters, other.adapters
        if other.weight.shape != self.weight.shape:
            raise ValueError(
                f"this session has {len(self.weight)} look-ahead slots, the method has {len(other.weight)}"
            )
        if (other.deep is None) != (self.deep is None):
            raise ValueError("this session and the method differ in whether slots shift the input of every layer")
        if (theirs is None) != (mine is None):
            raise ValueError("this session and the method differ in whether slots have adapters")
        if mine is not None and theirs is not None:
            if not mine.has_shapes_of(theirs):
                raise ValueError(
                    "this session and the method differ in the places, ranks or scale of the slots' adapters"
                )
            if self.weight.is_cpu:  # no recorded call reads them
                self.adapters = theirs
            else:
                mine.copy_(theirs)
        self.weight.copy_(other.weight)
        if self.deep is not None and other.deep is not None:
            self.deep.copy_(other.deep)

    def of_call(self, ids: Tensor) -> CallSlots | None:
        """For rows with the ids ``[N]``; None if they need nothing but embeddings. Adapters are left out where no row is a
        slot's and that can be seen without a synchronisation."""
        adapters = None if ids.is_cpu and self.adapters is not None and not bool((ids < 0).any()) else self.adapters
        return None if self.deep is None and adapters is None else CallSlots(ids, self.deep, adapters)


class CallSlots:
    """What the rows of slots have in a call beside their embeddings. ids ``[N]``: negative ones are of slots."""

    def __init__(self, ids: Tensor, deep: Tensor | None, adapters: PlacedAdapters | None) -> None:
        self.ids, self.deep, self.adapters = ids, deep, adapters

    @cached_property
    def offsets(self) -> Tensor | None:
        """``[layers, N, d]``: in layer l ``deep[l, i]`` for a row with id -1 - i, zeros for tokens; None: there are none."""
        if self.deep is None:
            return None
        known = torch.cat([self.deep.new_zeros(len(self.deep), 1, self.deep.shape[2]), self.deep], dim=1)
        return known.index_select(1, (-self.ids).clamp(min=0).long())

    def adapt_(self, place: str, out: Tensor, x: Tensor) -> Tensor:
        """Adds the products of the rows of slots to ``out [..., out]``, in place; a place without an adapter adds nothing."""
        if self.adapters is None or place not in self.adapters.pairs:
            return out
        down, up = self.adapters.pairs[place]
        if down.dtype is not out.dtype:  # layers that compute in another dtype than the table's
            x, down, up = (tensor.to(out.dtype) for tensor in (x, down, up))
        _op(out, x, self.ids, down, up, self.adapters.scale)
        return out

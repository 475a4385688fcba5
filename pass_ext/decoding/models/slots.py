"""``PlacedSlots``: the parameters of look-ahead slots as a session holds them, in the dtype and on the device of a model.
``CallSlots``: those of one call, whose rows of slots are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.models.parts import decoder_layers, linear_at, sizes_of
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.ops import adapter  # noqa: F401, which registers the op

_op = torch.ops.pass_ext.adapter_rows_.default
Pair = tuple[Tensor, Tensor]


class PlacedAdapters(NamedTuple):
    """Copies of adapters in the dtype and on the device of a model."""

    scale: float
    pairs: Mapping[str, Pair]
    """Place, such as "3.self_attn.q_proj", -> down ``[K, r, in]`` and up ``[K, r, out]``: layers of ``stacks``."""
    stacks: Sequence[tuple[str, Tensor, Tensor]]
    """A place in a layer, such as "self_attn.q_proj", down ``[layers, K, r, in]`` and up ``[layers, K, r, out]`` of the layers
    that have it in one rank and size."""

    @classmethod
    @torch.no_grad()
    def of(cls, adapters: SlotAdapters, slots: int, like: Tensor) -> PlacedAdapters:
        """Copies of the adapters of the first ``slots`` slots, as ``like``; contiguous, which the op of all layers wants."""
        alike: dict[Any, dict[str, Pair]] = {}
        for place, down, up in adapters.pairs(slots):
            alike.setdefault((place.partition(".")[2], down.shape, up.shape), {})[place] = down, up
        pairs: dict[str, Pair] = {}
        stacks = []
        for (name, *_), found in alike.items():
            down, up = (torch.stack(sides).to(like).contiguous() for sides in zip(*found.values(), strict=True))
            stacks.append((name, down, up))
            pairs |= zip(found, zip(down.unbind(), up.unbind(), strict=True), strict=True)
        return cls(adapters.scale, pairs, stacks)

    def check_places(self, model: Any) -> None:
        """Refuses adapters of linear layers that the transformers model does not have, or has in other sizes."""
        layers = decoder_layers(model)
        for place, (down, up) in self.pairs.items():
            sizes, module = (down.shape[2], up.shape[2]), linear_at(layers, place)
            there = None if module is None else sizes_of(module)
            if there != sizes:
                found = "no such layer" if module is None else f"{there}"
                raise ValueError(f"these adapters have one for {place} with (in, out) = {sizes}, the model has {found}")


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
        return cls(
            lookahead.weight[:count].detach().to(like, copy=True),
            None if deep is None else deep[:, :count].detach().to(like, copy=True),
            None if adapters is None else PlacedAdapters.of(adapters, count, like),
        )

    def is_like(self, other: PlacedSlots) -> bool:
        """True if both have the same parts, of the same shapes."""
        mine, theirs = ([None if x is None else x.shape for x in (slots.weight, slots.deep)] for slots in (self, other))
        return mine == theirs and _sizes(self.adapters) == _sizes(other.adapters)

    def copy_(self, other: PlacedSlots) -> None:
        """Takes the numbers of slots like these in place: recorded calls read the same memory."""
        mine, theirs = self.adapters, other.adapters
        self.weight.copy_(other.weight)
        if self.deep is not None and other.deep is not None:
            self.deep.copy_(other.deep)
        if mine is not None and theirs is not None:
            for (_, *stacks), (_, *new) in zip(mine.stacks, theirs.stacks, strict=True):
                for stack, numbers in zip(stacks, new, strict=True):
                    stack.copy_(numbers)

    def of_call(self, ids: Tensor) -> CallSlots | None:
        """For rows with the ids ``[N]``; None if they need nothing but embeddings. Adapters are left out where no row is a
        slot's and that can be seen without a synchronisation."""
        adapters = None if ids.is_cpu and self.adapters is not None and not bool((ids < 0).any()) else self.adapters
        return None if self.deep is None and adapters is None else CallSlots(ids, self.deep, adapters)


def with_vectors(hidden: Tensor, offsets: Tensor) -> Tensor:
    """A layer's input with the vector ``offsets[i]`` ``[N, d]`` added to row i of each text, where a row has several streams to
    each of them: ``[B, N, d]``, ``[B, N, streams, d]``, ``[B, N, streams * d]`` or ``[streams, B, N, d]``."""
    count, width = offsets.shape
    if hidden.dim() == 4 and hidden.shape[1] != count and hidden.shape[2:] == offsets.shape:
        return hidden + offsets
    if hidden.dim() not in (3, 4) or hidden.shape[1] != count or hidden.shape[-1] % width:
        raise ValueError(
            f"these look-ahead slots have vectors for the inputs of layers, for these rows {list(offsets.shape)}, and a "
            f"layer's input is {list(hidden.shape)}: use slots without"
        )
    streams = hidden.unflatten(-1, (-1, width))
    return (streams + offsets.view(1, count, *(1,) * (streams.dim() - 3), width)).flatten(-2)


def _sizes(adapters: PlacedAdapters | None) -> Any:
    if adapters is None:
        return None
    return adapters.scale, [*adapters.pairs], [(name, down.shape, up.shape) for name, down, up in adapters.stacks]


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

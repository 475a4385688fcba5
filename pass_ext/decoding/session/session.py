"""``Session``: the keys and values of one batch, and the model's calls on packed rows.

Caches are ``[B, room, KV heads, D]`` per layer; on the CPU they begin with fewer positions and grow with the texts. A call's
new keys and values stay outside the caches until ``commit`` moves the accepted ones in, so a call never changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.slots import PlacedSlots
from pass_ext.decoding.session.recording import RecordedCalls
from pass_ext.decoding.session.step_attention import NewRows, StepAttention, head_dim_for, padded
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.cache import cache_commit_
from pass_ext.tree import PackedTrees

_FIRST_POSITIONS = 1024
"""Of caches on the CPU. On CUDA recorded calls read them where they are, so they have all at once."""


class Session:
    """The caches of one batch of B requests, and the calls that extend them.

    Args:
        model: the adapted model.
        requests: B.
        room: the most text positions of each request.
        graphs: on CUDA, calls of a repeated shape are CUDA graphs.
    """

    def __init__(
        self,
        model: Adapted,
        requests: int,
        room: int,
        *,
        graphs: bool = False,
    ) -> None:
        self.model = model
        self.requests = requests
        self.room = room
        table = model.table
        self.slots = PlacedSlots(table.new_empty(0, table.shape[1]))
        self.prefix_lens = torch.zeros(requests, dtype=torch.int32, device=table.device)
        self.caches: list[tuple[Tensor, Tensor]] = []
        self._stack: Tensor | None = None  # all caches, if all layers' are alike
        self._positions = min(room, _FIRST_POSITIONS) if table.is_cpu else room  # that the caches hold now
        self.head_dims: list[tuple[int, int]] = []  # of keys and values, before padding to a head size of the kernel
        self.fixed_steps: dict[Any, Any] = {}
        """Recorded steps of fixed plans, by their shape and parameters."""
        self.is_undisturbed = False
        """No code of the caller's runs between calls: what a call finds out about the model holds for the next ones."""
        self._has_called = False
        self._new: NewRows = []
        self._recorded = RecordedCalls(self._forward) if graphs and table.is_cuda else None

    @property
    def device(self) -> torch.device:
        """The device of the model and the caches."""
        return self.prefix_lens.device

    @property
    def records(self) -> bool:
        """True: calls of a repeated shape are CUDA graphs."""
        return self._recorded is not None

    def call(
        self, trees: PackedTrees, ids: Tensor, wanted: Tensor | None = None, *, may_hold_slots: bool = True
    ) -> Tensor:
        """Calls the model on all rows of the trees, ids ``[N]`` as ``lookahead_embed`` takes them. The next call may overwrite
        the logits. may_hold_slots: False if no row is a look-ahead slot's."""
        if self._recorded is not None and wanted is None and self.caches:
            logits, self._new = self._recorded(trees, ids)
        else:
            logits, self._new = self._forward(trees, ids, wanted, may_hold_slots=may_hold_slots)
        return logits

    def call_at(self, trees: PackedTrees, ids: Tensor, positions: Tensor) -> Tensor:
        """Calls the model on all rows, whose text positions ``[N]`` int64 are known. Only work for the device: a CUDA graph of
        more than this call can hold it."""
        logits, self._new = self._forward(trees, ids, positions=positions)
        return logits

    def _forward(
        self,
        trees: PackedTrees,
        ids: Tensor,
        wanted: Tensor | None = None,
        positions: Tensor | None = None,
        may_hold_slots: bool = True,
    ) -> tuple[Tensor, NewRows]:
        """Logits, and keys and values of all layers. positions: None: computed from the texts' lengths."""
        attention = StepAttention(self, trees, ids, may_have_changed=not (self.is_undisturbed and self._has_called))
        self._has_called = True
        if positions is None:
            # Not repeat_interleave, whose threads, one per request, spin beside those of the layers.
            numbers = torch.arange(len(ids), dtype=torch.int32, device=self.device)
            owners = torch.bucketize(numbers, trees.cu_nodes[1:], right=True)
            positions = (self.prefix_lens[owners] + trees.depths).long()
        rows = self.model.embed(ids, self.slots.weight)
        slots = self.slots.of_call(ids) if may_hold_slots else None
        logits = self.model(rows, positions, attention, wanted, slots)
        layers = attention.layers
        if layers != len(self.caches) or not layers:
            raise ValueError(
                f"{self.model.name or 'the model'}: {layers} layers attended, {len(self.caches)} in the first call or in "
                "`past`: every layer that mixes rows must do so by attention, each time"
            )
        if attention.is_first and self.model.layers not in (None, layers):
            raise ValueError(
                f"{self.model.name}: {layers} of {self.model.layers} layers attended; every layer must, by attention that "
                "takes transformers' AttentionInterface"
            )
        return logits, attention.new_rows()

    def commit(self, trees: PackedTrees, path: Tensor, num_accepted: Tensor) -> None:
        """Adds the keys and values of the rows ``path[b, :num_accepted[b] + 1]``; requests without rows stay as they are."""
        self.store(trees, path, num_accepted)
        self.prefix_lens.add_((num_accepted + 1).where(trees.cu_nodes.diff() > 0, 0))

    def store(self, trees: PackedTrees, path: Tensor, num_accepted: Tensor) -> None:
        """Puts these keys and values behind the texts; the texts' lengths ``prefix_lens`` stay as they are."""
        if self._positions < self.room:
            self._hold(int(self.prefix_lens.max()) + path.shape[1])
        cache_commit_(self.all_caches(), self.prefix_lens, trees.cu_nodes, path, num_accepted, new=self._new)

    def keep(self, lengths: Sequence[int]) -> None:
        """Drops the keys and values behind the first ``lengths[b]`` tokens of each text."""
        most = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self.prefix_lens.copy_(self.prefix_lens.minimum(most))

    def copy_text(self, request: int, others: Sequence[int], first: int, last: int) -> None:
        """Gives other requests the tokens [first, last) of a request's text, the last ones that they hold then."""
        to = torch.tensor(others, device=self.device)
        for pair in self.caches:
            for cache in pair:
                cache[to, first:last] = cache[request, first:last]
        self.prefix_lens[to] = last

    def _hold(self, positions: int) -> None:
        """Moves the caches to larger ones if they do not hold so many positions."""
        former, width = self._positions, self.prefix_lens.max()
        if positions <= former:
            return
        self._positions = min(self.room, max(positions, 2 * former))
        caches, dims = self.caches, self.head_dims
        self.caches, self.head_dims, self._stack = [], [], None
        for (keys, values), sizes in zip(caches, dims, strict=True):
            self.add_layer(keys[0, :0], values[0, :0], sizes)
            for cache, full in zip(self.caches[-1], (keys, values), strict=True):
                cache[:, :width] = full[:, :width]

    def groups_of_equal_texts(self, length: int) -> list[list[int]]:
        """The requests by the keys and values of their first ``length`` tokens: equal tokens may have others, where they come
        from elsewhere."""
        if not length:
            return [list(range(self.requests))]
        groups: list[list[int]] = []
        caches = [cache for pair in self.caches for cache in pair]
        for b in range(self.requests):
            for group in groups:
                if all(torch.equal(cache[group[0], :length], cache[b, :length]) for cache in caches):
                    group.append(b)
                    break
            else:
                groups.append([b])
        return groups

    def begin(self, model: Adapted) -> None:
        """Drops the texts; caches and recorded calls stay for the next texts. model: the same model, adapted anew."""
        self.model = model
        self.is_undisturbed = False
        self._has_called = False
        self.prefix_lens.zero_()

    def set_slots(self, lookahead: LookaheadEmbedding, count: int) -> None:
        """Sets the first ``count`` slots for the next calls. After a first call their number, and what they have, are fixed,
        because recorded calls read the same buffers."""
        placed = PlacedSlots.of(lookahead, count, self.slots.weight)
        if placed.adapters is not None:
            self.model.check_adapters(placed.adapters)
        if self.caches:
            self.slots.copy_(placed)
        else:
            self.slots = placed

    def first_layers(self, model: Adapted, count: int) -> Session:
        """A session on the same texts for a model of this model's first layers. It reads these caches and commits nothing."""
        return _FirstLayers(self, model, count)

    def fill(self, past: Sequence[tuple[Tensor, Tensor]], length: int) -> None:
        """Starts from keys and values, ``[B, n, KV heads, D]`` per layer, of the first ``length`` tokens of every text.

        Existing caches are written in place, because recorded calls read them there.
        """
        first = not self.caches
        if not past or (not first and len(past) != len(self.caches)):
            raise ValueError(f"past must be of each layer, {len(self.caches) or '1 or more'}, got {len(past)}")
        self._hold(min(length, self.room))
        for layer, pair in enumerate(past):
            for x in pair:
                if x.dim() != 4 or x.shape[0] != self.requests or x.shape[1] < length:
                    raise ValueError(
                        f"past: keys and values of layer {layer} must be [{self.requests}, {length} or more, heads, D], got "
                        f"{list(x.shape)}"
                    )
            width = head_dim_for(max(x.shape[-1] for x in pair))
            rows = [padded(x[:, :length], width) for x in pair]
            if first:
                self.add_layer(rows[0][0], rows[1][0], (pair[0].shape[-1], pair[1].shape[-1]))
            self.check_rows(layer, *(x[0] for x in rows))
            for cache, x in zip(self.caches[layer], rows, strict=True):
                cache[:, :length] = x
        self.prefix_lens.fill_(length)

    def all_caches(self) -> list[Tensor] | Tensor:
        """Keys and values of layer 0, of layer 1 …: ``[2 * layers, B, room, KV heads, D]`` if they are alike, else a list."""
        if self._stack is not None and len(self._stack) == 2 * len(self.caches):
            return self._stack
        return [cache for layer in self.caches for cache in layer]

    def add_layer(self, keys: Tensor, values: Tensor, dims: tuple[int, int]) -> None:
        """Allocates the caches of a layer for rows like these, ``[N, KV heads, padded D]``."""
        layer, shape = len(self.caches), (self.requests, self._positions, *keys.shape[1:])
        self.head_dims.append(dims)
        is_alike = keys.shape == values.shape and keys.dtype == values.dtype
        if layer == 0 and is_alike and self.model.layers is not None:
            self._stack = keys.new_empty(2 * self.model.layers, *shape, device=self.device)
        stack = self._stack
        if (
            stack is not None
            and is_alike
            and stack[0].shape == shape
            and stack.dtype == keys.dtype
            and 2 * layer < len(stack)
        ):
            self.caches.append((stack[2 * layer], stack[2 * layer + 1]))
            return
        self._stack = None  # the layers before keep their parts of it
        room = self.requests, self._positions
        self.caches.append(
            (
                keys.new_empty(*room, *keys.shape[1:], device=self.device),
                values.new_empty(*room, *values.shape[1:], device=self.device),
            )
        )

    def check_rows(self, layer: int, *rows: Tensor) -> None:
        """Refuses keys and values of another shape or dtype than the caches, which the first call or ``past`` made."""
        for cache, x in zip(self.caches[layer], rows, strict=True):
            if cache.shape[2:] != x.shape[1:] or cache.dtype != x.dtype:
                raise ValueError(
                    f"layer {layer}: keys and values in the cache, from `past` or a first call, are "
                    f"{cache.dtype} {list(cache.shape[2:])} (heads, padded D), those given now {x.dtype} "
                    f"{list(x.shape[1:])}"
                )


class _FirstLayers(Session):
    def __init__(self, whole: Session, model: Adapted, count: int) -> None:
        super().__init__(model, whole.requests, whole.room)
        self._whole, self._count = whole, count
        self.prefix_lens = whole.prefix_lens

    def call(
        self, trees: PackedTrees, ids: Tensor, wanted: Tensor | None = None, *, may_hold_slots: bool = True
    ) -> Tensor:
        """As ``Session``."""
        self.caches = self._whole.caches[: self._count]
        return super().call(trees, ids, wanted, may_hold_slots=may_hold_slots)

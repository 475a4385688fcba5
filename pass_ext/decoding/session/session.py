"""``Session``: the KV cache of one batch and the states of its texts, and the model's calls on packed rows.

Caches are ``[B, capacity, KV heads, D]`` per layer; on the CPU they begin with fewer positions and grow with texts. New keys
and values of a call stay outside the caches until ``commit`` moves the accepted ones in, so a call never changes the text.
States, of layers that keep one instead of keys and values, are ``[B, ...]``; ``commit`` moves them after the accepted rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.arguments import instance, type_of, whole_number
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.cached_rows import is_front
from pass_ext.decoding.models.encoders import Encoded, EncoderInputs
from pass_ext.decoding.models.one_order import check_seen
from pass_ext.decoding.models.packed import Adapted, NewRows
from pass_ext.decoding.models.slots import PlacedSlots
from pass_ext.decoding.models.step_states import StatePlace, StepStates, Update
from pass_ext.decoding.models.taps import Tap, Taps
from pass_ext.decoding.session.recording import Called, RecordedCalls, can_record
from pass_ext.decoding.session.step_attention import StepAttention
from pass_ext.decoding.session.text_states import TextStates
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.attention import padded_widths
from pass_ext.ops.cache import cache_commit_
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.ops.quantize import CODE_HEADER, MOST_OF_CODES
from pass_ext.ops.state import state_commit_
from pass_ext.tree import PackedTrees, Tree, pack_trees

Layers = Sequence[tuple[Tensor, Tensor]]
Past = Sequence[Any]
"""Keys and values of each layer that attends; their number of tokens, of all texts or of each; and, where there are some, the
states after these, and the offsets of the texts' positions after pictures."""

_MOST = 1 << 30  # positions are int32
_MOST_PACKED = 256
_FIRST_POSITIONS = 1024
"""Positions of new caches on the CPU. On CUDA recorded calls read them where they are, so they have all at once."""


class Session:
    """The KV cache of one batch of texts, the model's calls that extend it, and how they run.

    ``generate(model, input_ids, session=session)`` leaves in ``caches`` the keys and values of all tokens but each text's last
    one, ``prefix_lens`` of them, and in ``states`` what the layers that keep a state have after these tokens. The next
    generation of as many texts, by any method, uses the caches again, and CUDA graphs unless it needs more room or other slots.

    Args:
        model: as ``generate`` takes it.
        requests, capacity: the number of texts, and the most tokens of each; None: the first generation's number, and as many
            tokens as each generation needs.
        past: the keys and values of the first n tokens of every prompt, ``[B, n, heads, D]`` per layer that attends; and n, of
            all prompts or of each; and, if the model has some, the states after them, ``[B, ...]``; and, if pictures were
            read, the ``session.offsets`` of then. The next generation begins with them; set ``session.past`` for a later one.
        cuda_graphs: True: on CUDA, calls of a repeated shape are CUDA graphs. False: none are. None: where all steps have one
            shape (``run_ahead``), the step is one graph, unless the model does what a graph cannot hold: then it warns.
        run_ahead: True: the host begins each step before it has read the one before, so a GPU never waits for it; texts are the
            same. Refused where the host decides between steps: with logits processors, grammars, ``logprobs``, ``support``,
            methods other than ``Plain`` and ``PaSS``, and sampled rules other than "coupled". None: where it is possible and
            pays. False: the host makes the rows of each step.
        cache_dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2: keys and values are stored in 8 bits with a scale for
            each token and head (``quantize_rows``). All rows attend to the stored numbers, so every method writes ``Plain``'s
            text over the same cache. None: in the model's dtype.
        batch_invariant: True: each row of a call has the bits that it has alone, on a GPU too, and rows of prompts as well: so
            greedy and coupled texts are ``Plain``'s to the token, alone and in any batch. Slower: all products of the model,
            those of experts too, are ``linear_rows``, and on a GPU attention adds in one order. A model is refused whose sums
            have no one order: quantised weights here, other operations at the first call. False: on the CPU rows of steps
            have these bits anyway, but for those of experts.
    """

    def __init__(
        self,
        model: Any,
        requests: int | None = None,
        capacity: int | None = None,
        *,
        past: Past | None = None,
        cuda_graphs: bool | None = None,
        run_ahead: bool | None = None,
        cache_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        if past is not None and not (isinstance(past, (list, tuple)) and len(past) in (2, 3, 4)):
            raise TypeError(
                "Session: past must be the keys and values of every layer, the number of tokens, and the states and the "
                f"offsets of positions if there are some, got {type_of(past)}"
            )
        for name, number in (("requests", requests), ("capacity", capacity)):
            if number is not None:
                whole_number(f"Session: {name}, if not None,", number, most=_MOST)
        for name, switch in (("cuda_graphs", cuda_graphs), ("run_ahead", run_ahead)):
            instance(f"Session: {name}", switch, (bool, NoneType), "True, False or None")
        instance("Session: batch_invariant", batch_invariant, bool, "True or False")
        if cache_dtype is not None and not (isinstance(cache_dtype, torch.dtype) and cache_dtype in MOST_OF_CODES):
            raise ValueError(
                f"Session: cache_dtype must be {', '.join(map(str, MOST_OF_CODES))} or None, got {cache_dtype!r}"
            )
        self.past, self.cuda_graphs, self.run_ahead = past, cuda_graphs, run_ahead
        self.model: Adapted = packed_model(model)
        if batch_invariant:
            check_seen(self.model.model)
        self.cache_dtype, self.batch_invariant = cache_dtype, batch_invariant
        self._grows = capacity is None
        self.caches: list[tuple[Tensor, Tensor]] = []
        self._stack: Tensor | None = None  # all caches, if all layers' are alike
        self.states: list[Tensor] = []
        """Of the layers that keep one, in the order of their calls."""
        self.state_places: list[StatePlace] = []
        self.head_dims: list[tuple[int, int]] = []  # of keys and values, before padding to a head size of the kernel
        self.fixed_steps: dict[Hashable, object] = {}
        """Steps that may be CUDA graphs, by their rows and parameters."""
        self.wants_states = True
        """States are wanted after a generation too: texts whose last step went beyond their ends are read again for them."""
        self.reads_prompts = False
        """The next calls are on rows of prompts."""
        self.is_undisturbed = False
        """No code of the caller's runs between calls: a model that was checked in one is the same in the next ones."""
        self.offsets: Tensor | None = None
        """``[B]``, each text's position of a row less its index in the text; None: they are the same."""
        self.encoder_inputs: EncoderInputs | None = None
        self.encoded: Encoded | None = None
        """What rows see of an encoder's outputs besides their text; None: nothing."""
        self.read_logits: Tensor | None = None
        """``[B, V]``, of the last tokens of whole prompts, which the session holds already; None: it does not."""
        self.begins: list[int]
        """The first token of each text after all rows that are no token's own."""
        self._has_called = self._is_in_use = False
        self.text_states: TextStates | None = None
        """The hidden states of the texts, from ``tap`` on."""
        self._taps: tuple[Tap, ...] = ()
        self._packed: dict[tuple[Tree | None, ...], PackedTrees] = {}
        self._new: NewRows = []
        self._updates: list[Update] = []
        self._hidden: Tensor | None = None
        self.read: tuple[list[int], list[Tensor]] | None = None  # lengths and states of whole prompts
        self._records = bool(cuda_graphs) and can_record(self.model.table.device)
        self._recorded = RecordedCalls(self._forward) if self._records else None
        self._allocate(requests or 0, capacity or 0)

    def _allocate(self, requests: int, capacity: int) -> None:
        table = self.model.table
        self.requests, self.capacity = requests, capacity
        # Inference tensors would break a session that is used again outside the caller's inference mode.
        with torch.inference_mode(False):
            self.slots = PlacedSlots(table.new_empty(0, table.shape[1]))
            self.prefix_lens = torch.zeros(requests, dtype=torch.int32, device=table.device)
            self.state_lens = torch.zeros_like(self.prefix_lens)  # tokens that the states are of
        self.offsets, self.begins = None, [0] * requests
        self._positions = min(capacity, _FIRST_POSITIONS) if table.is_cpu else capacity  # that the caches hold now

    @property
    def device(self) -> torch.device:
        """The device of the model and the caches."""
        return self.prefix_lens.device

    @property
    def is_new(self) -> bool:
        """The session has no caches and states yet; its first call makes them."""
        return not self.caches and not self.states

    def step_states(self, trees: PackedTrees, *, is_first: bool) -> StepStates:
        """The states of a call."""
        return StepStates(
            self.states,
            self.state_places,
            self.requests,
            trees.parents,
            trees.cu_nodes,
            is_first=is_first,
            is_prompt=self.reads_prompts,
        )

    def packed(self, trees: Sequence[Tree | None]) -> PackedTrees:
        """The trees of all requests, kept for repeated combinations; None: a request without rows."""
        key = tuple(trees)
        if key not in self._packed:
            if len(self._packed) >= _MOST_PACKED:
                self._packed.clear()
            self._packed[key] = pack_trees(trees, self.device)
        return self._packed[key]

    def call(self, trees: PackedTrees, ids: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Calls the model on all rows of the trees, ids ``[N]`` as ``lookahead_embed`` takes them -> logits of all rows, or
        of the ``wanted`` ones. The next call may overwrite them."""
        if self._recorded is not None and wanted is None and not self.is_new:
            logits, self._new, self._updates, hidden = self._recorded(trees, ids, self.model)
            self._hidden = None if hidden is None else hidden.clone()
        else:
            logits, self._new, self._updates, self._hidden = self._forward(trees, ids, wanted)
        return logits

    def call_at(self, trees: PackedTrees, ids: Tensor, positions: Tensor) -> Tensor:
        """Calls the model on all rows, whose text positions ``[N]`` int64 are known. Only work for the device: a CUDA graph of
        more than this call can hold it."""
        logits, self._new, self._updates, self._hidden = self._forward(trees, ids, positions=positions)
        return logits

    def _forward(
        self, trees: PackedTrees, ids: Tensor, wanted: Tensor | None = None, positions: Tensor | None = None
    ) -> Called:
        """Calls the model. positions: None: computed from the texts' lengths."""
        taps = Taps(self._taps) if self._taps else None
        may_have_changed = not (self.is_undisturbed and self._has_called)
        attention = StepAttention(self, trees, ids, may_have_changed=may_have_changed, taps=taps)
        self._has_called = True
        if positions is None:
            positions = (self.prefix_lens.index_select(0, trees.owners) + trees.depths).long()
        if self.offsets is not None:
            positions = positions + self.offsets[trees.owners]
        rows = self.model.embed(ids, self.slots.weight)
        logits = self.model(rows, positions, attention, wanted, self.slots.of_call(ids))
        layers, updates = attention.layers, attention.states.updates
        if len(updates) != len(self.states):
            raise ValueError(
                f"{self.model.name}: {len(updates)} states were read, {len(self.states)} in the first call or in `past`: every "
                "layer must keep as many, each time"
            )
        if layers != len(self.caches) or not (layers or updates):
            raise ValueError(
                f"{self.model.name or 'the model'}: {layers} layers attended, {len(self.caches)} in the first call or in "
                "`past`: every layer that mixes rows must do so by attention, each time"
            )
        return logits, attention.new_rows(), updates, None if taps is None else taps.states

    def commit(self, trees: PackedTrees, path: Tensor, num_accepted: Tensor) -> None:
        """Adds the keys and values of the rows ``path[b, :num_accepted[b] + 1]``; requests without rows stay as they are."""
        self.store(trees, path, num_accepted)
        self.prefix_lens.addcmul_(num_accepted + 1, trees.has_rows)

    def store(self, trees: PackedTrees, path: Tensor, num_accepted: Tensor) -> None:
        """Puts these keys and values after the texts; the texts' lengths ``prefix_lens`` stay as they are."""
        if self._positions < self.capacity:
            self.hold(int(self.prefix_lens.max()) + path.shape[1])
        if self.caches:
            cache_commit_(self.all_caches(), self.prefix_lens, trees.cu_nodes, path, num_accepted, new=self._new)
        if self.states:
            state_commit_(self.states, self._updates, trees.cu_nodes, path, num_accepted)
            places = torch.arange(path.shape[1], device=self.device)
            counts = ((path >= 0) & (places <= num_accepted[:, None])).sum(1)
            self.state_lens.add_(counts * trees.has_rows)
        if self.text_states is not None and self._hidden is not None:
            self.text_states.add(self._hidden, trees, path, num_accepted)

    def tap(self, taps: Sequence[Tap]) -> None:
        """Has ``text_states`` keep the hidden states of the texts at these places from the next call on; none: keeps none."""
        if taps:
            self.model.check_taps(taps)
        if tuple(taps) != self._taps and self._records:  # recorded calls compute what was wanted before
            self._recorded = RecordedCalls(self._forward)
        self._taps = tuple(taps)
        self.text_states = TextStates(self.requests) if taps else None

    def keep(self, lengths: Sequence[int]) -> None:
        """Drops the keys and values after the first ``lengths[b]`` tokens of each text."""
        most = uploaded(lengths, self.device, torch.int32)
        self.prefix_lens.copy_(self.prefix_lens.minimum(most))

    def beyond(self) -> list[int]:
        """The requests whose states are of more tokens than ``prefix_lens``: a step has gone on after the text's end."""
        if not self.states:
            return []
        return (self.state_lens != self.prefix_lens).nonzero()[:, 0].tolist()

    def forget(self, requests: Sequence[int]) -> list[int]:
        """Drops the texts of these requests, but for what was read of prompts that are more than text -> the number of tokens
        that each request holds."""
        at = uploaded(requests, self.device)
        lengths, states = ([0] * self.requests, [None] * len(self.states)) if self.read is None else self.read
        for state, kept in zip(self.states, states, strict=True):
            state[at] = 0 if kept is None else kept[at]
        self.prefix_lens[at] = self.state_lens[at] = self.prefix_lens.new_tensor(lengths)[at]
        return lengths

    def copy_text(self, request: int, others: Sequence[int], first: int, last: int) -> None:
        """Gives other requests the tokens [first, last) of a request's text, the last ones that they hold then."""
        to = uploaded(others, self.device)
        for pair in self.caches:
            for cache in pair:
                cache[to, first:last] = cache[request, first:last]
        for state in self.states:
            state[to] = state[request].clone()
        self.prefix_lens[to] = self.state_lens[to] = last
        if self.text_states is not None:
            self.text_states.copy(request, others)

    def hold(self, positions: int) -> None:
        """Moves the caches to larger ones if they do not hold so many positions."""
        former, width = self._positions, self.prefix_lens.max()
        if positions <= former:
            return
        self._positions = min(self.capacity, max(positions, 2 * former))
        caches, dims = self.caches, self.head_dims
        self.caches, self.head_dims, self._stack = [], [], None
        for (keys, values), sizes in zip(caches, dims, strict=True):
            self.add_layer(keys[0, :0], None if is_front(values, keys) else values[0, :0], sizes)
            for cache, full in zip(self.caches[-1], (keys, values), strict=True):
                cache[:, :width] = full[:, :width]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, another generation with this session is refused: a streamer may call ``generate``, or another thread."""
        if self._is_in_use:
            raise RuntimeError(
                "generate: session is in use by a generation that has not ended, and holds its texts: give another Session"
            )
        self._is_in_use = True
        try:
            yield
        finally:
            self._is_in_use = False

    def begin(self, model: Adapted, requests: int, longest: int, max_depth: int, deepest_row: int) -> None:
        """Drops the texts; caches and recorded calls stay for the next ones, which must fit.

        Args:
            model: the same model, adapted anew.
            longest: the length that the longest text may reach.
            max_depth: of candidates, some of which the last step may accept after the limit. deepest_row: below the text's end.
        """
        limit, positions = model.rope_limit, model.known_positions
        if limit is not None and longest + deepest_row > limit:
            raise ValueError(
                f"{model.name} changes its rotary frequencies after {limit} tokens, and earlier keys would not "
                f"fit: prompt, max_new_tokens and the deepest draft must stay within them, got {longest + deepest_row}"
            )
        if positions is not None and longest > positions + 1:  # + 1: the model never reads the last new token
            raise ValueError(
                f"{model.name} has a table of {positions} positions and none after them: prompt and "
                f"max_new_tokens must stay within {positions + 1} tokens, got {longest}"
            )
        needed = longest + max_depth
        is_large_enough = self._grows or needed <= self.capacity
        if self.model.model is not model.model or requests != (self.requests or requests) or not is_large_enough:
            raise ValueError(
                f"session must be of this model, {requests} requests and room for {needed} tokens; it is of "
                f"{self.requests} requests and {self.capacity} tokens. Make a new one; Session(model) has room for any texts"
            )
        self.model = model
        if not self.requests or not self.capacity:
            self._allocate(requests, self.capacity or needed)
        elif needed > self.capacity:
            self.capacity = needed
            if not model.table.is_cpu:
                self.forget_recorded()
                self.hold(needed)
        self.is_undisturbed = False
        self._has_called = False
        self.prefix_lens.zero_()
        self.state_lens.zero_()
        self.begins, self.read, self.read_logits = [0] * requests, None, None
        self.encoder_inputs = self.encoded = None
        for tensor in (*self.states, *([] if self.offsets is None else [self.offsets])):
            tensor.zero_()

    def set_slots(self, lookahead: LookaheadEmbedding, count: int) -> None:
        """Sets the first ``count`` slots for the next calls. Recorded calls read the slots' memory: others of the same shapes
        take their place there, and other shapes are recorded anew."""
        placed = PlacedSlots.of(lookahead, count, self.slots.weight)
        if placed.adapters is not None:
            self.model.check_adapters(placed.adapters)
        if self.slots.is_like(placed):
            self.slots.copy_(placed)
        else:
            self.slots = placed
            self.forget_recorded()

    def forget_recorded(self) -> None:
        """Has calls and steps recorded anew, because the memory that they read is given up."""
        self.fixed_steps.clear()
        if self._recorded is not None:
            self._recorded = RecordedCalls(self._forward)

    def all_caches(self) -> list[Tensor] | Tensor:
        """Keys and values of layer 0, of layer 1 …: ``[2 * layers, B, capacity, KV heads, D]`` if all are alike; or a list."""
        if self._stack is not None and len(self._stack) == 2 * len(self.caches):
            return self._stack
        return [cache for layer in range(len(self.caches)) for cache in self.parts(layer)]

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        """The caches of a layer: of keys, and of values unless these are the keys' first numbers."""
        keys, values = self.caches[layer]
        return (keys,) if is_front(values, keys) else (keys, values)

    def add_layer(self, keys: Tensor, values: Tensor | None, dims: tuple[int, int]) -> None:
        """Allocates the caches of a layer for rows like these, ``[N, KV heads, padded D]``. values: None if they are the first
        numbers of the keys."""
        layer, shape = len(self.caches), (self.requests, self._positions, *keys.shape[1:])
        self.head_dims.append(dims)
        if values is None:
            self._end_stack()
            new_keys = keys.new_empty(shape, device=self.device)
            header = CODE_HEADER if keys.dtype in MOST_OF_CODES else 0
            width = padded_widths(*dims, self.device, in_codes=bool(header))[1]
            self.caches.append((new_keys, new_keys[..., : header + width]))
            return
        is_alike = keys.shape == values.shape and keys.dtype == values.dtype
        if layer == 0 and is_alike and self.model.caches is not None:
            self._stack = keys.new_empty(2 * self.model.caches, *shape, device=self.device)
        stack = self._stack
        is_alike &= stack is not None and stack[0].shape == shape and stack.dtype == keys.dtype
        if stack is not None and is_alike and 2 * layer < len(stack):
            self.caches.append((stack[2 * layer], stack[2 * layer + 1]))
            return
        self._end_stack()
        new_keys, new_values = (x.new_empty(*shape[:2], *x.shape[1:], device=self.device) for x in (keys, values))
        self.caches.append((new_keys, new_values))

    def _end_stack(self) -> None:
        """The layers before keep their parts of the stack, and the memory of all others is freed."""
        if self._stack is not None:
            self._stack.untyped_storage().resize_(self._stack[: 2 * len(self.caches)].nbytes)
            self._stack = None

    def check_rows(self, layer: int, *rows: Tensor) -> None:
        """Refuses keys and values of another shape or dtype than the caches, which the first call or ``past`` made."""
        for cache, x in zip(self.caches[layer], rows, strict=True):
            if cache.shape[2:] != x.shape[1:] or cache.dtype != x.dtype:
                raise ValueError(
                    f"layer {layer}: keys and values in the cache, from `past` or a first call, are "
                    f"{cache.dtype} {list(cache.shape[2:])} (heads, padded D), those given now {x.dtype} "
                    f"{list(x.shape[1:])}"
                )


class FirstLayers(Session):
    """A session on the same texts for a model of the first layers. It reads the whole session's caches and states, and commits
    nothing."""

    def __init__(self, whole: Session, model: Adapted, count: int) -> None:
        super().__init__(
            model, whole.requests, whole.capacity, cache_dtype=whole.cache_dtype, batch_invariant=whole.batch_invariant
        )
        self._whole, self._count = whole, count
        self.prefix_lens = whole.prefix_lens

    def call(self, trees: PackedTrees, ids: Tensor, wanted: Tensor | None = None) -> Tensor:
        whole, attending = self._whole, self._count if self.model.caches is None else self.model.caches
        self.caches, self.offsets = whole.caches[:attending], whole.offsets
        self.encoded = whole.encoded
        kept = [
            (state, place)
            for state, place in zip(whole.states, whole.state_places, strict=True)
            if place.layer < self._count
        ]
        self.states, self.state_places = [state for state, _ in kept], [place for _, place in kept]
        return super().call(trees, ids, wanted)

"""``TransformersModel``: an unmodified transformers model that writes text as a packed model, run by one of two backends.

fused          few rows, by our ops alone, once a comparison has shown the model's own bits
module         all else: the forward of its shadow on one "batch" of all rows, ``inputs_embeds [1, N, d]`` with explicit
               ``position_ids`` and no cache, whose attention passes queries, keys and values to the session
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pass_ext.decoding.models import limits
from pass_ext.decoding.models.backend import Backend, ModelState, backend_of, keep_backend, known_backend
from pass_ext.decoding.models.encoders import decoder_inputs
from pass_ext.decoding.models.equivalence import MACHINE
from pass_ext.decoding.models.features.table import (
    FEATURES,
    attending_layers,
    computed_by,
    serve_features,
    widths_after,
)
from pass_ext.decoding.models.fused_forward import FusedForward, is_hooked
from pass_ext.decoding.models.layer_kinds import STATES, keeps_states, kinds_of
from pass_ext.decoding.models.module_ops import (
    are_few,
    computes_by_ops,
    is_autocast_enabled,
    is_plain,
    is_untouched,
    most_few_rows,
)
from pass_ext.decoding.models.packed import Adapted, KeptHidden, StepAttend
from pass_ext.decoding.models.parts import (
    decoder_layers,
    decoder_of,
    has_encoder,
    number_of_layers,
    reads_whole,
    text_parts,
    unwrapped,
)
from pass_ext.decoding.models.row_attention import (
    AttentionCalls,
    attend_by_rows,
    is_being_recorded,
    layers_with_keys_of_others,
)
from pass_ext.decoding.models.shadow import (
    OurCall,
    add_adapters,
    give_positions,
    our_call,
    shadow_of,
    shift_layers,
    takes_rows_of_our_call,
    tap_layers,
)
from pass_ext.decoding.models.slots import CallSlots, PlacedAdapters
from pass_ext.decoding.models.taps import Tap, check_places
from pass_ext.decoding.models.vocabulary import logit_shards_of
from pass_ext.ops.lookahead import lookahead_embed
from pass_ext.weights.layers import PackedEmbedding, table_of

_replaced: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], dict[int, int]]] = WeakKeyDictionary()
"""Of each model without hooks, by the placeholders that its config names: the tokens that it embeds as others. To find them out
takes a shadow and two calls."""


class TransformersModel(Adapted):
    """A transformers model as a packed model, which is called inside ``attached``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.name = model.config.model_type
        self.generation_config = getattr(model, "generation_config", None)
        self.has_encoder = has_encoder(model)
        self.reads_whole = reads_whole(unwrapped(model))
        self._embedding = module = (decoder_of(unwrapped(model)) if self.has_encoder else model).get_input_embeddings()
        if not hasattr(module, "weight"):
            raise ValueError(
                f"{self.name} embeds tokens by {type(module).__name__}, which has no table of rows, so pass_ext cannot decode "
                "this model"
            )
        self.has_table = not isinstance(module, PackedEmbedding) and is_plain(module.weight)
        self.table = module.weight if self.has_table else _shape_of_table(module, self.name)
        limits.check_model(model, self.name, self.table.dtype)
        text = model.config.get_text_config(decoder=True)
        self.numbers = attending_layers(text)
        self._layers = number_of_layers(model.config) if self.numbers is None else len(self.numbers)
        self.caches = None if self._layers is None else self._layers - layers_with_keys_of_others(unwrapped(model))
        widths = widths_after(unwrapped(model))
        self.widths_after = {(self.numbers or {}).get(layer, layer): width for layer, width in widths.items()}
        self.keeps_states = keeps_states(text)
        self._takes_positions = limits.position_taker(model) is unwrapped(model)
        named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions"))
        self.most_positions = next(filter(None, named), self.most_positions)
        self.rope_limit = limits.rope_limit(text)
        self.known_positions = limits.known_positions(model, self.most_positions)
        self._kept = limits.kept_by_cache(text)
        self.logit_shards = logit_shards_of(unwrapped(model))
        self._ran = False
        self._attended: list[Any] | None = None  # the layers of the first call's attention calls
        self._replaced: dict[int, int] | None = None
        self._users = 0
        self._hidden: KeptHidden | None = None
        self._end()

    def _end(self) -> None:
        """Lets go of all that is of one generation."""
        self._shadow: Any = None
        self._is_shifted = self._is_tapped = False
        self._adapted: set[str] = set()
        self._state: ModelState | None = None
        self._backend: Backend | None = None
        self._own: FusedForward | None = None

    @property
    def stored_table(self) -> Tensor | None:
        return self._embedding.weight if isinstance(self._embedding, PackedEmbedding) else super().stored_table

    def embed(self, ids: Tensor, slots: Tensor) -> Tensor:
        """The embedding rows of ids ``[N]``, by the model's own module if that does more than look up."""
        ids = self._embedded(ids)
        if self.has_table and type(self._embedding) is nn.Embedding and is_untouched(self._embedding):
            return lookahead_embed(ids, self.table, slots)
        rows = self._embedding(ids.clamp(min=0))
        if not len(slots):
            return rows
        return torch.where((ids < 0)[:, None], slots[(-1 - ids).clamp(min=0)].to(rows.dtype), rows)

    def _embedded(self, ids: Tensor) -> Tensor:
        """The ids ``[N]``, where the model embeds another token in place of some that one."""
        for token, stand_in in (self._replaced or {}).items():
            ids = ids.masked_fill(ids == token, stand_in)
        return ids

    @contextmanager
    def attached(self) -> Iterator[None]:
        self._users += 1
        try:
            if self._users == 1:
                self._begin()
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._end()

    def _begin(self) -> None:
        are_hooked = is_hooked(text_parts(self.model))
        if self._replaced is None:
            self._replaced = self._find_replaced(may_be_kept=not are_hooked)
        if self.keeps_states:
            self._backend = Backend(None, f"its layers keep states, by {' and '.join(computed_by(self.model))}")
        elif self.has_encoder:
            self._backend = Backend(None, "its rows attend to an encoder too")
        elif self.model is not unwrapped(self.model):
            self._backend = Backend(None, f"it is wrapped by {type(self.model).__name__}")
        elif self.logit_shards is not None:
            self._backend = Backend(None, "its logits are divided among ranks")
        elif are_hooked:
            self._backend = Backend(None, "hooks or autocast reach into its modules")
        else:
            self._state = ModelState(self.model)
            self._take(known_backend(self.model, self._state))

    def _take(self, backend: Backend | None) -> None:
        self._backend = backend
        if backend is not None and backend.plan is not None:
            self._own = FusedForward(backend.plan, self.model, self._norm, self._head)

    @property
    def backend(self) -> str:
        if self._backend is None:
            return "module: not compared yet"
        return "fused" if self._backend.plan is not None else f"module: {self._backend.reason}"

    def _its_shadow(self) -> Any:
        if self._shadow is None:
            shadow = shadow_of(self.model)
            inner = unwrapped(shadow)
            if self._layers != 0 and not any(feature.attends(inner) for feature in FEATURES):
                attend_by_rows(inner)
            taker = limits.position_taker(inner)
            if taker is not None and not self._takes_positions:
                give_positions(taker)
            serve_features(inner, self._embedded)
            computes_by_ops(inner, takes_rows_of_our_call)
            head = inner.get_output_embeddings()
            if isinstance(head, nn.Module):
                head.forward = partial(self._kept_before, head.forward)
            self._shadow = shadow
        return self._shadow

    def _kept_before(self, head: Any, *inputs: Any, **named: Any) -> Any:
        if self._hidden is not None:
            self._hidden.keep(inputs[0])
        return head(*inputs, **named)

    @contextmanager
    def keeping_hidden(self) -> Iterator[KeptHidden]:
        """As ``Adapted``; other models with the same output layer keep nothing."""
        self._output_layer()  # refuses a model without
        with self.attached():
            former, self._hidden = self._hidden, KeptHidden()
            try:
                yield self._hidden
            finally:
                self._hidden = former

    def _find_replaced(self, *, may_be_kept: bool) -> dict[int, int]:
        placeholders = limits.placeholder_ids(self.model.config, len(self.table))
        if not placeholders or self.has_encoder:
            return {}
        key, known = tuple(placeholders), _replaced.setdefault(unwrapped(self.model), {})
        if may_be_kept and key in known:
            return known[key]
        pad = getattr(self.model.config.get_text_config(decoder=True), "pad_token_id", None)
        stand_ins = [0, *([] if pad is None else [pad])]
        shadow = unwrapped(self._its_shadow())
        with torch.no_grad():
            found = limits.replaced_ids(shadow, self.name, placeholders, stand_ins, self.embed_tokens)
        if may_be_kept and found is not None:
            known[key] = found
        return found or {}

    def __call__(
        self, rows: Tensor, positions: Tensor, attend: StepAttend, wanted: Tensor | None, slots: CallSlots | None = None
    ) -> Tensor:
        if not self._users:
            raise RuntimeError(
                f"{type(self.model).__name__} is not attached: it takes packed rows inside `attached()` only"
            )
        if slots is not None and slots.deep is not None:
            self._check_deep(slots.deep)
        if self.known_positions is not None:  # drafts after the last one are never accepted
            positions = positions.clamp(max=self.known_positions - 1)
        if self._own is not None and attend.may_have_changed and not self._own.is_current():
            self._own = None
            self._backend = Backend(None, "hooks or other weights have come to its modules")
        try:
            logits = self._computed(rows, positions, attend, wanted, slots)
        except MACHINE:
            raise
        except Exception as error:
            if self._ran or (isinstance(error, (ValueError, NotImplementedError)) and self.name in str(error)):
                raise
            raise self._refusal(error) from error
        if self.keeps_states and not self._ran:
            self._check_states(attend.states.layers)
        self._ran = True
        if self._backend is None and not is_being_recorded(rows) and (len(rows) > 1 or not attend.is_first):
            self._compare(rows, positions, attend)
        return logits

    def _computed(
        self, rows: Tensor, positions: Tensor, attend: StepAttend, wanted: Tensor | None, slots: CallSlots | None
    ) -> Tensor:
        own, hidden = self._own, self._hidden
        most = sys.maxsize if own is not None and own.is_packed else most_few_rows(rows.dtype, rows.is_cpu)
        text_rows = attend.text_rows if len(rows) > most else len(rows)
        if own is not None and own.takes(rows) and are_few(len(rows), most, text_rows):
            logits = own(rows, positions, attend, wanted, slots, ends_apart=hidden is not None)
            if logits is not None:
                return logits
        logits = self._by_module(rows, positions, attend, wanted, slots, text_rows)
        if wanted is not None and len(logits) != len(wanted):  # some models of transformers 4 ignore logits_to_keep
            if hidden is not None:
                hidden.keep(hidden.rows[wanted])
            return logits[wanted]
        return logits

    def _by_module(
        self,
        rows: Tensor,
        positions: Tensor,
        attend: StepAttend,
        wanted: Tensor | None = None,
        slots: CallSlots | None = None,
        text_rows: int = sys.maxsize,
    ) -> Tensor:
        """The shadow's call."""
        shadow = self._its_shadow()
        if slots is not None and slots.deep is not None and not self._is_shifted:
            shift_layers(unwrapped(shadow))
            self._is_shifted = True
        if attend.taps is not None and not self._is_tapped:
            tap_layers(unwrapped(shadow))
            self._is_tapped = True
        if slots is not None and slots.adapters is not None:
            added = slots.adapters.pairs.keys() - self._adapted
            add_adapters(unwrapped(shadow), added)
            self._adapted |= added
        seen = torch.ones(1, len(rows), dtype=torch.bool, device=rows.device)
        places = {"position_ids": positions[None]} if self._takes_positions else {}
        attended = AttentionCalls()
        call = OurCall(
            attend,
            self.name,
            self._kept,
            seen,
            slots,
            attended,
            text_rows,
            positions,
            attend.batch_invariant,
            attend.taps,
        )
        inputs: dict[str, Any] = dict(inputs_embeds=rows[None], attention_mask=seen, use_cache=False, return_dict=True)
        inputs |= {**places, "logits_to_keep": 0 if wanted is None else wanted}
        if self.has_encoder:
            inputs = decoder_inputs(self.model, attend.encoded, rows, seen)
        with our_call(call):
            logits: Tensor = shadow(**inputs).logits[0]
        self._check_attended(attended.layers)
        if self.has_encoder and attend.heard != len(attended.layers):
            raise ValueError(
                f"{self.name}: {attend.heard} of {len(attended.layers)} layers attended to the encoder's rows; every layer must"
            )
        return logits

    def _check_attended(self, layers: list[Any]) -> None:
        """Refuses a model some of whose layers have not attended, or that attends in another order than before."""
        if self._attended is None:
            expected = set(range(self._layers or 0) if self.numbers is None else self.numbers)
            # Several layers may have one module, and the calls of a loop one layer's number.
            if not expected <= set(layers) and len(layers) != self._layers:
                raise ValueError(
                    f"{self.name}: {len(set(layers))} of {self._layers} layers attended; every layer must, by attention that "
                    "takes transformers' AttentionInterface"
                )
            self._attended = layers
            self.attends_again = len(layers) not in (len(set(layers)), self._layers)
        if layers != self._attended:
            raise ValueError(
                f"{self.name}: layers attended in the order {layers}, in the first call in the order {self._attended}: each "
                "call finds its cache by that order, so it must be one"
            )

    def _check_states(self, read: set[int]) -> None:
        """Refuses a model some of whose layers have kept no state in its first call."""
        kinds = kinds_of(self.model.config.get_text_config(decoder=True))
        silent = [layer for layer, kind in enumerate(kinds) if kind in STATES and layer not in read]
        if silent:
            raise ValueError(
                f"{self.name}: layers {silent} keep a state, but called none of {', '.join(computed_by(self.model))}, so "
                "pass_ext cannot decode this model"
            )

    def _norm(self, hidden: Tensor, batch_invariant: bool) -> Tensor:
        """The shadow's final norm."""
        with our_call(OurCall(None, batch_invariant=batch_invariant)):  # few rows, as they are in such a call
            normed: Tensor = decoder_of(self._its_shadow()).norm(hidden)
        return normed

    def output(self, rows: Tensor) -> Tensor:
        """The output layer on rows ``[R, d]`` after the final norm: logits ``[R, V]``."""
        return self._head(rows[None], batch_invariant=False)[0]

    def _head(self, normed: Tensor, batch_invariant: bool) -> Tensor:
        """The shadow's output layer."""
        with our_call(OurCall(None, batch_invariant=batch_invariant)):
            logits: Tensor = self._its_shadow().get_output_embeddings()(normed)
        return logits

    def _compare(self, rows: Tensor, positions: Tensor, attend: StepAttend) -> None:
        """Finds out how calls of few rows are computed from now on."""
        assert self._state is not None
        hidden, self._hidden = self._hidden, None
        backend = backend_of(self.model, self._by_module, (self._norm, self._head), rows, positions, attend)
        self._hidden = hidden
        keep_backend(self.model, self._state, backend)
        self._take(backend)

    def check_taps(self, taps: Sequence[Tap]) -> None:
        check_places(taps, len(decoder_layers(unwrapped(self.model))), self.name)

    def check_adapters(self, adapters: PlacedAdapters) -> None:
        if self.logit_shards is not None:
            raise ValueError(
                f"{self.name}: look-ahead slots with adapters cannot be used under tensor parallelism, where each rank has a "
                "part of a linear layer; use slots without"
            )
        inner = unwrapped(self.model)
        adapters.check_places(inner)
        for end, reason in filter(None, (feature.unadapted(inner) for feature in FEATURES)):
            place = next((place for place in adapters.pairs if place.endswith(end)), None)
            if place is not None:
                raise ValueError(
                    f"{self.name}: these look-ahead slots have an adapter for {place}, {reason}: leave it out"
                )

    def _refusal(self, error: Exception) -> Exception:
        """The error of a failed first call, with a message that begins with the model's name."""
        if isinstance(error, (NotImplementedError, ValueError)) and _is_ours(error):
            kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
            return kind(f"{self.name}: {error}")
        return ValueError(
            f"{self.name}: {type(self.model).__name__}.forward fails on packed rows (inputs_embeds [1, N, d] and position_ids, "
            f"no ids and no cache){' under torch.autocast' if is_autocast_enabled() else ''}, so pass_ext cannot decode it"
            f"{' there' if is_autocast_enabled() else ''}: {type(error).__name__}: {error}"
        )

    def _check_deep(self, deep: Tensor) -> None:
        """Refuses vectors of slots that do not fit the model's layers."""
        text = self.model.config.get_text_config(decoder=True)
        layers, _, width = deep.shape
        if layers != text.num_hidden_layers:
            raise ValueError(
                f"these look-ahead slots are for {layers} layers, {self.name} has {text.num_hidden_layers}"
            )
        if width != text.hidden_size:
            raise ValueError(
                f"the slots' vectors per layer must be {text.hidden_size} wide in {self.name}, got {width}"
            )


def _is_ours(error: Exception) -> bool:
    """True if code of this package has raised the error, in the words of a refusal."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("pass_ext.")


def _shape_of_table(embedding: nn.Module, name: str) -> Tensor:
    """A tensor of the weight's shape and dtype, without values, on the device of the embedding's output."""
    if isinstance(embedding, PackedEmbedding):
        return table_of(embedding)
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    device: Any = weight.device
    if weight.is_meta:
        hook = getattr(embedding, "_hf_hook", None)  # accelerate's hook loads the weights for each call
        device = getattr(hook, "execution_device", None)
        if device is None:
            raise ValueError(f"{name}: the embedding table is on the meta device: load the model's weights first")
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.empty(1, 1, dtype=weight.dtype, device=device).expand(weight.shape)

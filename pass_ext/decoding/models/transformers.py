"""``TransformersModel``: an unmodified transformers decoder-only model as a packed model, run in one of two ways.

own forward    few rows, by our ops alone, once a comparison has shown the model's own bits
as it is       all else: the forward of its shadow on one "batch" of all rows, ``inputs_embeds [1, N, d]`` with explicit
               ``position_ids`` and no cache, whose attention passes queries, keys and values to the session
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.early_exit.draft import unwrapped
from pass_ext.decoding.models.logit_shards import logit_shards_of
from pass_ext.decoding.models.packed import Adapted, Attend, StepAttend
from pass_ext.decoding.models.patching.comparison import MACHINE, believed_plan
from pass_ext.decoding.models.patching.few_rows import are_few, few_rows_linear, most_few_rows
from pass_ext.decoding.models.patching.known_parts import computes_by_ops
from pass_ext.decoding.models.patching.layer_adapters import adapting, add_adapters, check_places
from pass_ext.decoding.models.patching.layer_offsets import LayerOffsets, decoder_layers, decoder_of
from pass_ext.decoding.models.patching.model_plan import Unlike
from pass_ext.decoding.models.patching.own_forward import OwnForward, is_hooked
from pass_ext.decoding.models.patching.row_attention import (
    OurCall,
    are_few_of_our_call,
    attend_by_rows,
    is_being_recorded,
    our_call,
)
from pass_ext.decoding.models.patching.shadow import own_hooks, shadow_of
from pass_ext.decoding.models.patching.way import ModelState, Way, keep_way, known_way
from pass_ext.decoding.models.peft_adapters import lost_adapter
from pass_ext.decoding.models.placeholders import placeholder_ids, replaced_ids
from pass_ext.decoding.models.plain_tensors import is_plain
from pass_ext.decoding.models.slots import CallSlots, PlacedAdapters
from pass_ext.ops.lookahead import lookahead_embed

_FULL = {"full_attention", "sliding_attention", "attention"}


class KeptHidden:
    """The input rows of a model's output layer, from its last call."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def keep(self, rows: Tensor, wanted: Tensor | None) -> None:
        """Keeps the rows ``[..., d]``; of all rows of a call, those ``wanted``."""
        rows = rows.flatten(0, -2)
        self._rows = rows if wanted is None or len(rows) == len(wanted) else rows[wanted]

    @property
    def rows(self) -> Tensor:
        """``[rows, d]``, one for each row of the last call's logits. Valid until the next call."""
        if self._rows is None:
            raise RuntimeError(
                "no hidden rows are kept: the model was not called yet, or it does not call its output layer (a replayed "
                "CUDA graph calls none)"
            )
        return self._rows


class TransformersModel(Adapted):
    """A transformers model as a packed model, which is called inside ``attached``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.name = model.config.model_type
        self.generation_config = getattr(model, "generation_config", None)
        module = model.get_input_embeddings()
        self._embedding = module
        self.has_table = is_plain(module.weight)
        self.table = module.weight if self.has_table else _shape_of_table(module, self.name)
        self._check()
        text = model.config.get_text_config(decoder=True)
        self.layers = getattr(text, "num_hidden_layers", None)
        self.most_positions = getattr(text, "max_position_embeddings", None) or self.most_positions
        self.rope_limit = _rope_limit(text)
        self.known_positions = _known_positions(model, self.most_positions)
        self._kept = _kept_by_cache(text)
        self.logit_shards = logit_shards_of(unwrapped(model))
        self._ran = False
        self._placeholders = placeholder_ids(model.config, len(self.table))
        self._replaced: dict[int, int] | None = None
        self._users = 0
        self._hidden: KeptHidden | None = None
        self._head_rows: Tensor | None = None
        self._end()

    def _end(self) -> None:
        """Lets go of all that is of one generation."""
        self._shadow: Any = None
        self._is_watched = False
        self._patches = ExitStack()
        self._offsets: LayerOffsets | None = None
        self._adapted: set[str] = set()
        self._state: ModelState | None = None
        self._way: Way | None = None
        self._own: OwnForward | None = None

    def _check(self) -> None:
        config = self.model.config
        text = config.get_text_config(decoder=True)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{self.name} is an encoder-decoder model; decoder-only models are supported")
        if "position_ids" not in inspect.signature(type(unwrapped(self.model)).forward).parameters:
            raise ValueError(
                f"{self.name}: {type(self.model).__name__}.forward takes no position_ids, so rows of a tree cannot be given "
                "their places in the text"
            )
        lost = lost_adapter(self.model)
        if lost is not None:
            raise ValueError(
                f"{self.name} {lost}: pass_ext gives the model packed rows of its own making, which would leave it out; use "
                "the model's own generate, or an adapter that changes layers only, as LoRA"
            )
        strange = sorted(set(getattr(text, "layer_types", None) or ()) - _FULL)
        if strange:
            raise ValueError(
                f"{self.name} has layers of the kind {', '.join(strange)}: what they keep of a text cannot be cut to the "
                "accepted tokens, so only models whose layers all attend are supported"
            )
        if getattr(text, "hidden_size_per_layer_input", 0):
            raise ValueError(
                f"{self.name} looks tokens up again in every layer, so look-ahead rows cannot be given to it"
            )
        if getattr(text, "attn_temperature_tuning", False):
            raise ValueError(
                f"{self.name} scales attention by the number of the row (attn_temperature_tuning), not by position"
            )
        if self.table.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"the model's dtype must be float32, float16 or bfloat16, got {self.table.dtype}")

    def embed(self, ids: Tensor, slots: Tensor) -> Tensor:
        """The embedding rows of ids ``[N]``, by the model's own module if that does more than look up."""
        for token, stand_in in (self._replaced or {}).items():
            ids = ids.masked_fill(ids == token, stand_in)
        return self._embed(ids, slots)

    def _embed(self, ids: Tensor, slots: Tensor) -> Tensor:
        if self.has_table and _only_looks_up(self._embedding):
            return lookahead_embed(ids, self.table, slots)
        rows = self._embedding(ids.clamp(min=0))
        if not len(slots):
            return rows
        return torch.where((ids < 0)[:, None], slots[(-1 - ids).clamp(min=0)].to(rows.dtype), rows)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The context in which the model is called, of one generation."""
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
        if self._placeholders and self._replaced is None:
            self._replaced = self._find_replaced()
        if self.model is not unwrapped(self.model):
            self._way = Way(None, f"it is wrapped by {type(self.model).__name__}")
        elif self.logit_shards is not None:
            self._way = Way(None, "its logits are divided among ranks")
        elif is_hooked(self.model.modules()):
            self._way = Way(None, "hooks or autocast reach into its modules")
        else:
            self._state = ModelState(self.model)
            self._take(known_way(self.model, self._state))

    def _take(self, way: Way | None) -> None:
        self._way = way
        if way is not None and way.plan is not None:
            self._own = OwnForward(way.plan, self.model, self._tail)

    @property
    def way(self) -> str:
        """How its calls of few rows are computed, and why so."""
        if self._way is None:
            return "as it is: not compared yet"
        return "own forward" if self._way.plan is not None else f"as it is: {self._way.reason}"

    def _its_shadow(self) -> Any:
        if self._shadow is None:
            if not self._users:
                raise RuntimeError(
                    f"{type(self.model).__name__} is not attached: it takes packed rows inside `attached()` only"
                )
            shadow = shadow_of(self.model)
            inner = unwrapped(shadow)
            attend_by_rows(inner)
            computes_by_ops(inner)
            self._patches.enter_context(few_rows_linear(inner, takes=are_few_of_our_call))
            if self._adapted:
                add_adapters(inner, self._adapted)
            self._shadow = shadow
            if self._hidden is not None:
                self._watch_head()
        return self._shadow

    def _watch_head(self) -> None:
        head = unwrapped(self._shadow).get_output_embeddings()
        own_hooks(head)
        head.register_forward_pre_hook(self._before_head)
        self._is_watched = True

    def _before_head(self, _module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if self._hidden is not None:
            self._head_rows = arguments[0]

    @contextmanager
    def keeping(self, hidden: KeptHidden) -> Iterator[None]:
        """Inside, the input rows of each call's output layer are kept."""
        self._hidden = hidden
        if self._shadow is not None and not self._is_watched:
            self._watch_head()
        try:
            yield
        finally:
            self._hidden = self._head_rows = None

    def _find_replaced(self) -> dict[int, int]:
        pad = getattr(self.model.config.get_text_config(decoder=True), "pad_token_id", None)
        stand_ins, none = [0, *([] if pad is None else [pad])], self.table.new_empty(0, self.table.shape[1])
        shadow = unwrapped(self._its_shadow())
        with torch.no_grad():
            return replaced_ids(shadow, self.name, self._placeholders, stand_ins, lambda ids: self._embed(ids, none))

    def __call__(
        self,
        rows: Tensor,
        positions: Tensor,
        attend: StepAttend,
        wanted: Tensor | None,
        slots: CallSlots | None = None,
    ) -> Tensor:
        """Calls the model on packed rows, as ``Adapted``."""
        if not self._users:
            self._its_shadow()  # says that it is not attached
        if slots is not None and slots.deep is not None:
            self._check_deep(slots.deep)
        if self.known_positions is not None:  # drafts behind the last one are never accepted
            positions = positions.clamp(max=self.known_positions - 1)
        own = self._own
        if own is not None and attend.may_have_changed and not own.is_current():
            own = self._own = None
            self._way = Way(None, "hooks or other weights have come to its modules")
        most = most_few_rows(rows.dtype, rows.is_cpu)
        slot_rows = attend.slot_rows if len(rows) > most else 0
        try:
            if own is not None and own.takes(rows) and are_few(len(rows), most, slot_rows):
                logits = own(rows, positions, attend, wanted, slots, ends_apart=self._hidden is not None)
                if logits is not None:
                    self._has_run(wanted)
                    return logits
            logits = self._as_it_is(rows, positions, attend, wanted, slots, slot_rows)
        except MACHINE:
            raise
        except Exception as error:
            if self._ran or (isinstance(error, (ValueError, NotImplementedError)) and self.name in str(error)):
                raise
            raise self._refusal(error) from error
        self._has_run(wanted)
        if self._way is None and not is_being_recorded(rows) and (len(rows) > 1 or not attend.is_first):
            self._compare(rows, positions, attend)
        return logits

    def _has_run(self, wanted: Tensor | None) -> None:
        self._ran = True
        if self._hidden is not None and self._head_rows is not None:
            self._hidden.keep(self._head_rows, wanted)

    def _as_it_is(
        self,
        rows: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        slots: CallSlots | None = None,
        slot_rows: int = 0,
    ) -> Tensor:
        """The shadow's call."""
        shadow = self._its_shadow()
        seen = torch.ones(1, len(rows), dtype=torch.bool, device=rows.device)
        offsets = None if slots is None else slots.offsets
        shifted = None if offsets is None else self._layer_offsets()
        try:
            if shifted is not None and offsets is not None:
                shifted.offsets = offsets
            with our_call(OurCall(attend, self.name, self._kept, seen, slot_rows)), adapting(slots):
                logits: Tensor = shadow(
                    inputs_embeds=rows[None],
                    attention_mask=seen,
                    position_ids=positions[None],
                    use_cache=False,
                    logits_to_keep=0 if wanted is None else wanted,
                    return_dict=True,
                ).logits[0]
        finally:
            if shifted is not None:
                shifted.offsets = None
        if wanted is not None and len(logits) != len(wanted):  # some models of transformers 4 ignore logits_to_keep
            return logits[wanted]
        return logits

    def _tail(self, hidden: Tensor) -> Tensor:
        """Norm and head of the shadow."""
        shadow = self._its_shadow()
        seen = torch.ones(1, hidden.shape[1], dtype=torch.bool, device=hidden.device)
        with our_call(OurCall(_nothing, self.name, (), seen)):  # few rows, as they are in such a call
            logits: Tensor = shadow.get_output_embeddings()(decoder_of(shadow).norm(hidden))
        return logits

    def _compare(self, rows: Tensor, positions: Tensor, attend: StepAttend) -> None:
        """Finds out how calls of few rows are computed from now on."""
        assert self._state is not None
        try:
            plan = believed_plan(self.model, self._as_it_is, self._tail, rows, positions, attend)
            way = Way(plan, "")
        except Unlike as unlike:
            way = Way(None, str(unlike))
        keep_way(self.model, self._state, way)
        self._take(way)

    def check_adapters(self, adapters: PlacedAdapters) -> None:
        """As ``Adapted``. Inside ``attached``."""
        if self.logit_shards is not None:
            raise ValueError(
                f"{self.name}: look-ahead slots with adapters cannot be used under tensor parallelism, where each rank has a "
                "part of a linear layer; use slots without"
            )
        check_places(unwrapped(self.model), adapters)
        added = adapters.pairs.keys() - self._adapted
        self._adapted |= added
        if self._shadow is not None:
            add_adapters(unwrapped(self._shadow), added)

    def _refusal(self, error: Exception) -> Exception:
        """The error of a failed first call, with a message that begins with the model's name."""
        if isinstance(error, NotImplementedError):
            return NotImplementedError(f"{self.name}: {error}")
        if isinstance(error, ValueError):
            return ValueError(f"{self.name}: {error}")
        return ValueError(
            f"{self.name}: {type(self.model).__name__}.forward fails on packed rows (inputs_embeds [1, N, d] and position_ids, "
            f"no ids and no cache), so pass_ext cannot decode it: {type(error).__name__}: {error}"
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

    def _layer_offsets(self) -> LayerOffsets:
        """The hooks of the shadow that add offsets, registered at first use."""
        if self._offsets is None:
            inner = unwrapped(self._its_shadow())
            for layer in decoder_layers(inner):
                own_hooks(layer)
            self._offsets = self._patches.enter_context(LayerOffsets(inner).attached())
        return self._offsets


def _nothing(layer: int, *_: Any, **__: Any) -> Tensor:
    raise RuntimeError(f"layer {layer} attends behind all layers")


def _only_looks_up(embedding: nn.Module) -> bool:
    """True for a plain ``nn.Embedding``: without hooks and without a replaced ``forward``."""
    hooks = embedding._forward_hooks or embedding._forward_pre_hooks
    return type(embedding) is nn.Embedding and "forward" not in vars(embedding) and not hooks


def _shape_of_table(embedding: nn.Module, name: str) -> Tensor:
    """A tensor of the weight's shape and dtype, without values, on the device of the embedding's output."""
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    device: Any = weight.device
    if weight.is_meta:
        hook = getattr(embedding, "_hf_hook", None)  # accelerate's hook loads the weights for each call
        device = getattr(hook, "execution_device", None)
        if device is None:
            raise ValueError(f"{name}: the embedding table is on the meta device: load the model's weights first")
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.empty(1, 1, dtype=weight.dtype, device=device).expand(weight.shape)


def _kept_by_cache(text: Any) -> tuple[int, ...]:
    """How many keys of a text each layer of transformers' own cache keeps; -1: all."""
    from transformers import DynamicCache

    if getattr(text, "num_hidden_layers", None) is None:
        return ()
    return tuple(getattr(layer, "sliding_window", None) or -1 for layer in DynamicCache(config=text).layers)


def _rope_limit(text: Any) -> int | None:
    """The longest text for which the model's rotary frequencies are those of a short text; None: any length."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    limits = []
    for rope in parameters.values() if all(isinstance(v, dict) for v in parameters.values()) else (parameters,):
        kind, limit = rope.get("rope_type", rope.get("type")), text.max_position_embeddings
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            limits.append(original or getattr(text, "original_max_position_embeddings", None) or limit)
        elif kind == "dynamic":
            limits.append(limit)
    return min(limits, default=None)


def _known_positions(model: Any, most: int) -> int | None:
    """``most`` if the model looks positions up in a table of that many rows, learned or a buffer; None if it computes them."""
    tokens = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module not in tokens]
    rows = {table.num_embeddings - getattr(table, "offset", 0) for table in tables}
    rows |= {
        len(buffer) for name, buffer in model.named_buffers() if buffer.dim() == 2 and "pos" in name.rsplit(".")[-1]
    }
    return most if most in rows else None

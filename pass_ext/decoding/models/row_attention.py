"""The attention and masks of a model's shadow, by a name that transformers finds them by.

The mask is not a tensor but a ``RowMask``, which holds window and chunk. "eager" and "sdpa" follow the mask
alone, so it decides here too; an attention call with another window is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.layer_attention import Attending
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.parts import decoder_of
from pass_ext.decoding.models.shadow import OurCall, own_call

KEY = "pass_ext_rows"  # without "flash" in it, which models search for


def attend_by_rows(shadow: Any) -> None:
    """Switches the attention of a model's shadow; refuses a model that has attention of its own."""
    _register()
    own = _parts_with_own_attention(shadow)
    if not own:
        shadow.set_attn_implementation(KEY)
        if (
            shadow.config.get_text_config(decoder=True)._attn_implementation != KEY
        ):  # encoders of pictures may keep theirs
            raise ValueError(
                f"{shadow.config.model_type}: {type(shadow).__name__} has attention of its own and takes no other "
                "(transformers' AttentionInterface), so pass_ext cannot decode it"
            )
    for part in modules_of(shadow):  # layers of another model have its config
        config = vars(part).get("config")
        if getattr(config, "_attn_implementation", KEY) != KEY:
            config._attn_implementation = {"": KEY}
    for part in own:  # calls PyTorch's attention if its config says so, with the mask that the model's config chooses
        part.config = copy.copy(part.config)
        part.config._attn_implementation = {"": "sdpa"}


_SDPA = functional.scaled_dot_product_attention


def _parts_with_own_attention(model: Any) -> list[Any]:
    """The modules that call PyTorch's attention by themselves, in a model that takes no other."""
    takes_ours = getattr(model, "_can_set_attn_implementation", None)
    if takes_ours is None or takes_ours():
        return []
    parts = modules_of(decoder_of(model))  # encoders are called with tensors
    codes = ((part, getattr(inspect.unwrap(type(part).forward), "__code__", None)) for part in parts)
    return [part for part, code in codes if code is not None and _SDPA.__name__ in code.co_names]


@lru_cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    # A compiled graph would keep the layer's number and the thread of its first call.
    AttentionInterface.register(KEY, torch.compiler.disable(_row_attention))
    AttentionMaskInterface.register(KEY, torch.compiler.disable(_row_mask))


def _call() -> OurCall:
    return own_call(f"attention {KEY!r} is")


# ---- masks ----


class Reach(NamedTuple):
    """How far back a row sees, in the terms of ``attention_tree``; -1: no limit."""

    window: int = -1
    chunk: int = -1

    def __str__(self) -> str:
        if self.chunk >= 0:
            return f"chunks of {self.chunk}"
        return f"a window of {self.window}" if self.window >= 0 else "no window"


class RowMask:
    """The mask of a step's rows. ``attend`` knows which rows see each other, so the mask only holds how far they reach. It is
    not a tensor: a model that computes with it is refused. A layer with attention of its own may call PyTorch's with it.

    Args:
        model: for messages.
        reach: what it hides of the rows before one.
        reason: why layers with this mask are refused, to follow "the mask "; None: they are not.
    """

    ndim = 4  # as a mask that is ready: transformers hands it on

    def __init__(self, model: str, reach: Reach, reason: str | None = None) -> None:
        self.model, self.reach, self.reason = model, reach, reason

    @property
    def shape(self) -> tuple[RowMask, ...]:
        """As many as dimensions; whatever computes with one of them is refused."""
        return (self,) * self.ndim

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal()

    def to(self, *where: Any, **options: Any) -> RowMask:
        """Itself on any device: accelerate moves all that a layer is given."""
        if any(isinstance(x, torch.dtype) for x in (*where, *options.values())):
            raise self._refusal()
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is _SDPA:
            return _attention_of_pytorch(*arguments, **(options or {}))
        masks = [mask for mask in (*arguments, *(options or {}).values()) if isinstance(mask, cls)]
        raise masks[0]._refusal() if masks else TypeError("an attention_mask of pass_ext.generate is not a tensor")

    def __getitem__(self, place: Any) -> RowMask:
        """The mask of one head, which is that of all, or of all rows. Nothing else can be taken out of it."""
        parts = [x for x in place if x not in (slice(None), slice(0, None))] if isinstance(place, tuple) else [place]
        if parts and (parts != [0] or place[1] != 0):
            raise self._refusal()
        return self

    def _refusal(self) -> ValueError:
        return ValueError(
            f"pass_ext attention: {self.model} computes with its attention_mask, and in trees there is none to compute with, "
            "so pass_ext cannot decode this model"
        )


def _refused(mask: RowMask, *_: Any) -> Any:
    raise mask._refusal()


_OPERATORS = "add radd sub rsub mul rmul truediv and rand or ror invert neg eq ne lt le gt ge"
for _operator in _OPERATORS.split():
    setattr(RowMask, f"__{_operator}__", _refused)


def _row_mask(**arguments: Any) -> RowMask:
    """The mask of one kind of layers. Only a layer that gets the mask raises its reason: some models make masks that no layer
    uses."""
    made = arguments["attention_mask"]
    if isinstance(made, RowMask):  # by the model around this one
        return made
    call, reach, reason = _call(), reach_of(arguments["mask_function"]), None
    if reach is None:
        reason = f"that {call.model} makes is neither causal, nor a sliding window, nor one of chunks"
    elif reach.window == 0:
        reason = "hides every row, as its sliding_window is 0"
    elif not _hides_nothing(made, call.seen):
        reason = f"hides rows or keys: {call.model} changes the attention_mask that it is given"
    return RowMask(call.model, reach or Reach(), reason)


def _hides_nothing(mask: Any, seen: Tensor) -> bool:
    """True if the mask is all True. Does not synchronise with the device if it is the tensor ``seen`` itself."""
    if not isinstance(mask, Tensor) or mask.shape != seen.shape:
        return False
    return mask.data_ptr() == seen.data_ptr() or is_being_recorded(mask) or bool(mask.all())


def is_being_recorded(tensor: Tensor) -> bool:
    """True while a CUDA graph is recorded, when values cannot be read; the call before, outside the graph, checked them."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def reach_of(mask_function: Callable[..., Any]) -> Reach | None:
    """The reach of a causal mask; None for any other pattern. Some masks let pictures see themselves both ways: for a text
    without any, such a mask is causal.

    transformers does not store the pattern, so the function is compared with the functions that ``masking_utils`` makes.
    """
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return Reach()
    parts = _captured(mask_function, masking_utils.and_masks, "mask_functions")
    if isinstance(parts, tuple) and len(parts) == 2 and parts[1] is masking_utils.causal_mask_function:
        window = _captured(parts[0], masking_utils.sliding_window_overlay, "sliding_window")
        if isinstance(window, int):
            return Reach(window=window)
        chunk = _captured(parts[0], masking_utils.chunked_overlay, "chunk_size")
        if isinstance(chunk, int) and chunk > 0:
            return Reach(chunk=chunk)
    blockwise = getattr(masking_utils, "blockwise_overlay", None)
    parts = _captured(mask_function, masking_utils.or_masks, "mask_functions")
    if blockwise is not None and isinstance(parts, tuple) and len(parts) == 2:
        blocks = _captured(parts[1], blockwise, "block_sequence_ids")
        if isinstance(blocks, Tensor) and (is_being_recorded(blocks) or not bool((blocks >= 0).any())):
            return reach_of(parts[0])
    return None


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """The window of a mask: -1 if a row sees itself and all rows before it; None if it is no window."""
    reach = reach_of(mask_function)
    return None if reach is None or reach.chunk >= 0 else reach.window


def _captured(function: Any, maker: Callable[..., Any], name: str) -> Any:
    """The closure variable of a function that ``maker`` returned; None for any other function."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or closure is None or code not in maker.__code__.co_consts or name not in code.co_freevars:
        return None
    return closure[code.co_freevars.index(name)].cell_contents


# ---- attention ----


class AttentionCalls:
    """The attention calls of one call of a model. Each has a cache of its own, so a layer that attends several times has
    several; but a call with the keys and values of an earlier one has that one's."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        """The layer of each, by the number that its module has."""
        self.handed: dict[nn.Module, Attending] = {}
        """What a part of a layer has made for the layer's attention, which takes it."""
        self._given: dict[int, tuple[ref[Tensor], ref[Tensor], int]] = {}

    def note(self, layer: Any, keys: Tensor, values: Tensor, caches: int) -> int:
        """Notes a call -> the number of its cache. caches: how many the calls so far have."""
        self.layers.append(layer)
        known_keys, known_values, number = self._given.get(id(keys), (None, None, caches))
        if known_keys is not None and known_values is not None and known_keys() is keys and known_values() is values:
            return number
        self._given[id(keys)] = ref(keys), ref(values), caches
        return caches


def reads_keys_of_cache(model: nn.Module) -> bool:
    """True if layers that share another layer's keys find them in transformers' cache, and without it compute their own, as
    before transformers 5.24."""
    return any("k_proj" in part._modules for part in _with_keys_of_others(model))


def layers_with_keys_of_others(model: nn.Module) -> int:
    """How many layers attend to the keys and values of an earlier one, and so need no cache."""
    return len(_with_keys_of_others(model))


def _with_keys_of_others(model: nn.Module) -> list[nn.Module]:
    return [part for part in modules_of(model) if vars(part).get("is_kv_shared_layer")]


_BY = "pass_ext_by"


def attend_by(part: nn.Module, ask: Callable[[dict[str, Any]], Attending | None]) -> None:
    """Has the attention of a shadow's layer attend by what ``ask`` makes of the arguments that the layer gives to attention; it
    takes those out that it serves."""
    vars(part)[_BY] = ask


# Tensors that models pass to attention and that do not change its result.
_INERT = {
    "cache_position",
    "input_ids",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "position_ids",
    "token_type_ids",
}


def _row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """q, k, v ``[1, heads, N, D]`` -> ``[1, N, heads, D of v]``. s_aux: the sinks."""
    call, rows = _call(), query.shape[2]
    encoded = None if call.attend.encoded is None else call.attend.encoded.layer_of(key)
    if encoded is not None:
        q = _autocast(query[0].transpose(0, 1))
        return call.attend.of_encoder(encoded, q, scale=scaling)[None], None
    others["attention_mask"] = attention_mask
    ask = vars(module).get(_BY)
    by = None if ask is None else ask(others)
    attention_mask = others.pop("attention_mask")
    kept_keys = dict(enumerate(call.kept)).get(module.layer_idx, -1)  # type: ignore[call-overload]
    reach, reason = _reach(module, attention_mask, rows, sliding_window, kept_keys)
    # Attention that has a causal mask goes by it, whatever the layer says of calls without one.
    is_causal = True if isinstance(attention_mask, RowMask) else None
    reason = reason or unsupported(module, rows, dropout, others, is_causal)
    if reason is not None:
        raise ValueError(
            f"pass_ext attention: {call.model}, layer {module.layer_idx}: {reason}, so pass_ext cannot decode this model"
        )
    q, k, v = (_autocast(x[0].transpose(0, 1)) for x in (query, key, value))
    options = dict(scale=scaling, softcap=softcap or 0.0, sinks=s_aux, **reach._asdict())
    number = call.attended.note(module.layer_idx, key, value, call.attend.layers)
    own = (None, None) if number < call.attend.layers else (k, v)
    out = call.attend(number, q, *own, **options, by=by)
    return out[None], None


def _autocast(x: Tensor) -> Tensor:
    """In autocast's dtype, as PyTorch's attention takes queries, keys and values."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class _OwnAttention:
    """Stands for the module of a layer that has called PyTorch's attention by itself."""

    training = True  # any dropout is refused

    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx


def _attention_of_pytorch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` with a ``RowMask``: q, k, v ``[1, heads, N, D]`` -> ``[1, heads, N, D of v]``."""
    layer: Any = _OwnAttention(len(_call().attended.layers))
    return _row_attention(layer, query, key, value, attn_mask, dropout_p, scale)[0].transpose(1, 2)


def _reach(
    module: nn.Module, mask: Any, rows: int, sliding_window: int | None, kept_keys: int
) -> tuple[Reach, str | None]:
    """The layer's reach; and why the call is refused, or None."""
    name, reach = type(module).__name__, Reach()
    if isinstance(mask, RowMask):
        if mask.reason is not None:
            return reach, f"the mask {mask.reason}"
        reach = mask.reach
    elif mask is not None and not _is_causal(mask, rows):
        return reach, f"{name} hands down an attention_mask of its own"
    conflict = window_conflict(module, None if sliding_window in (0, -1) else sliding_window, reach)
    # Few rows do not show the window of a mask tensor: refused too.
    if conflict is None and kept_keys >= 0 and not 0 <= max(reach) <= kept_keys:
        conflict = f"{name}'s mask has {reach}, but transformers' cache keeps the last {kept_keys} keys"
    return reach, conflict


def _is_causal(mask: Any, rows: int) -> bool:
    """True for a purely causal mask tensor. Some models of transformers 4 turn a mask of ones into such a tensor."""
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (rows, rows) or not mask.is_floating_point():
        return False
    if is_being_recorded(mask):
        return True
    hidden = mask < torch.finfo(mask.dtype).min / 2
    above = torch.ones(rows, rows, dtype=torch.bool, device=mask.device).triu(1)
    return bool((hidden == above).all() & (mask.masked_fill(above, 0) == 0).all())


def window_conflict(module: Any, sliding_window: int | None, reach: Reach) -> str | None:
    """The reason why a layer's ``sliding_window`` contradicts the reach of its mask; None if both agree or
    the layer passes no window. "eager" and "sdpa" obey the mask, so a layer that says otherwise is refused."""
    if sliding_window is None or sliding_window == reach.window:
        return None
    return f"{type(module).__name__} says sliding_window={sliding_window}, its mask has {reach}"


def unsupported(
    module: nn.Module, rows: int, dropout: float, others: dict[str, Any], is_causal: bool | None = None
) -> str | None:
    """Describes the first argument of attention that pass_ext does not implement, to follow "pass_ext attention: "; None: all
    are supported.

    rows: of the call, per request. is_causal: None: as the layer says.
    """
    name = type(module).__name__
    if dropout > 0.0 and module.training:
        return f"{name} asks for dropout {dropout}; call model.eval(), or train with 'sdpa'"
    own = getattr(module, "is_causal", True)
    # Some models pass is_causal=False for a single row, because it sees every key.
    if not (own if rows == 1 else others.get("is_causal", own)) and not is_causal:
        return f"{name} is not causal"
    if others.get("output_attentions"):
        return "output_attentions is not implemented"
    for argument, value in others.items():
        if argument not in _INERT and (
            isinstance(value, (Tensor, Attending)) or (value and argument in {"cache", "block_mask"})
        ):
            return f"{name} hands down {argument!r}, which may change the result and is not implemented"
    return None

"""The attention and masks of a model's shadow, by a name that transformers finds them by.

The mask is not a tensor but a ``RowMask``, which holds the window. "eager" and "sdpa" follow the mask
alone, so it decides here too; an attention call with another window is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.shadow import OurCall, current_call

KEY = "pass_ext_rows"  # without "flash" in it, which models search for


def attend_by_rows(shadow: Any) -> None:
    """Switches the attention of a model's shadow; refuses a model that has attention of its own."""
    _register()
    shadow.set_attn_implementation(KEY)
    if shadow.config._attn_implementation != KEY:
        raise ValueError(
            f"{shadow.config.model_type}: {type(shadow).__name__} has attention of its own and takes no other "
            "(transformers' AttentionInterface), so pass_ext cannot decode it"
        )
    for part in shadow.modules():  # layers of another model have its config
        config = vars(part).get("config")
        if getattr(config, "_attn_implementation", KEY) != KEY:
            config._attn_implementation = {"": KEY}


@lru_cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    # A compiled graph would keep the layer's number and the thread of its first call.
    AttentionInterface.register(KEY, torch.compiler.disable(_row_attention))
    AttentionMaskInterface.register(KEY, torch.compiler.disable(_row_mask))


def _call() -> OurCall:
    call = current_call.get()
    if call is None:
        raise RuntimeError(f"attention {KEY!r} is for pass_ext's own calls of a model")
    return call


# ---- masks ----


class RowMask:
    """The mask of a step's rows. ``attend`` knows which rows see each other, so the mask only holds the window. It is not a
    tensor: a model that computes with it is refused.

    Args:
        model: for messages.
        window: as ``attention_tree`` takes it; -1: no window.
        reason: why layers with this mask are refused, to follow "the mask "; None: they are not.
    """

    def __init__(self, model: str, window: int, reason: str | None = None) -> None:
        self.model, self.window, self.reason = model, window, reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        masks = [mask for mask in (*arguments, *(options or {}).values()) if isinstance(mask, cls)]
        raise masks[0]._refusal() if masks else TypeError("an attention_mask of pass_ext.generate is not a tensor")

    def _refusal(self) -> ValueError:
        return ValueError(
            f"pass_ext attention: {self.model} computes with its attention_mask, and in trees there is none to compute with, "
            "so pass_ext cannot decode this model"
        )


def _refused(mask: RowMask, *_: Any) -> Any:
    raise mask._refusal()


_OPERATORS = "getitem add radd sub rsub mul rmul truediv and rand or ror invert neg eq ne lt le gt ge"
for _operator in _OPERATORS.split():
    setattr(RowMask, f"__{_operator}__", _refused)


def _row_mask(**arguments: Any) -> RowMask:
    """The mask of one kind of layers. Only a layer that gets the mask raises its reason: some models make masks that no layer
    uses."""
    call, window = _call(), window_of(arguments["mask_function"])
    if window is None:
        return RowMask(call.model, -1, f"that {call.model} makes is neither causal nor a sliding window")
    if window == 0:
        return RowMask(call.model, -1, "hides every row, as its sliding_window is 0")
    if not _hides_nothing(arguments["attention_mask"], call.seen):
        return RowMask(call.model, -1, f"hides rows or keys: {call.model} changes the attention_mask that it is given")
    return RowMask(call.model, window)


def _hides_nothing(mask: Any, seen: Tensor) -> bool:
    """True if the mask is all True. Does not synchronise with the device if it is the tensor ``seen`` itself."""
    if not isinstance(mask, Tensor) or mask.shape != seen.shape:
        return False
    return mask.data_ptr() == seen.data_ptr() or is_being_recorded(mask) or bool(mask.all())


def is_being_recorded(tensor: Tensor) -> bool:
    """True while a CUDA graph is recorded, when values cannot be read; the call before, outside the graph, checked them."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """The window of a mask: -1 if a row sees itself and all rows before it, w if it sees the last w of these; None for any
    other pattern.

    transformers does not store the pattern, so the function is compared with the functions that ``masking_utils`` makes.
    """
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return -1
    parts = _captured(mask_function, masking_utils.and_masks, "mask_functions")
    if isinstance(parts, tuple) and len(parts) == 2 and parts[1] is masking_utils.causal_mask_function:
        window = _captured(parts[0], masking_utils.sliding_window_overlay, "sliding_window")
        if isinstance(window, int):
            return window
    return None


def _captured(function: Any, maker: Callable[..., Any], name: str) -> Any:
    """The closure variable of a function that ``maker`` returned; None for any other function."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or closure is None or code not in maker.__code__.co_consts or name not in code.co_freevars:
        return None
    return closure[code.co_freevars.index(name)].cell_contents


# ---- attention ----

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
    kept_keys = dict(enumerate(call.kept)).get(module.layer_idx, -1)  # type: ignore[call-overload]
    window, reason = _window(module, attention_mask, rows, sliding_window, kept_keys)
    reason = reason or unsupported(module, rows, dropout, others)
    if reason is not None:
        raise ValueError(
            f"pass_ext attention: {call.model}, layer {module.layer_idx}: {reason}, so pass_ext cannot decode this model"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    if call.numbers is not None:  # one module may be several layers' and knows none of them
        layer = call.numbers.get(layer, call.attend.layers)
    options = dict(scale=scaling, softcap=softcap or 0.0, window=window, sinks=s_aux)
    return call.attend(layer, q, k, v, **options)[None], None


def _window(
    module: nn.Module, mask: Any, rows: int, sliding_window: int | None, kept_keys: int
) -> tuple[int, str | None]:
    """The layer's window; and why the call is refused, or None."""
    name, window = type(module).__name__, -1
    if isinstance(mask, RowMask):
        if mask.reason is not None:
            return -1, f"the mask {mask.reason}"
        window = mask.window
    elif mask is not None and not _is_causal(mask, rows):
        return -1, f"{name} hands down an attention_mask of its own"
    conflict = window_conflict(module, None if sliding_window in (0, -1) else sliding_window, window)
    if conflict is not None:
        return -1, conflict
    if kept_keys >= 0 and not 0 <= window <= kept_keys:  # few rows do not show the window of a mask tensor: refused too
        return -1, f"{name}'s mask has {_window_text(window)}, but transformers' cache keeps the last {kept_keys} keys"
    return window, None


def _is_causal(mask: Any, rows: int) -> bool:
    """True for a purely causal mask tensor. Some models of transformers 4 turn a mask of ones into such a tensor."""
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (rows, rows) or not mask.is_floating_point():
        return False
    if is_being_recorded(mask):
        return True
    hidden = mask < torch.finfo(mask.dtype).min / 2
    above = torch.ones(rows, rows, dtype=torch.bool, device=mask.device).triu(1)
    return bool((hidden == above).all() & (mask.masked_fill(above, 0) == 0).all())


def window_conflict(module: Any, sliding_window: int | None, window: int) -> str | None:
    """The reason why a layer's ``sliding_window`` contradicts the window of its mask; None if both agree or
    the layer passes no window. "eager" and "sdpa" obey the mask, so a layer that says otherwise is refused."""
    if sliding_window is None or sliding_window == window:
        return None
    return f"{type(module).__name__} says sliding_window={sliding_window}, its mask has {_window_text(window)}"


def _window_text(window: int) -> str:
    return f"a window of {window}" if window >= 0 else "no window"


def unsupported(module: nn.Module, rows: int, dropout: float, others: dict[str, Any]) -> str | None:
    """Describes the first argument of attention that pass_ext does not implement, to follow "pass_ext attention: "; None: all
    are supported.

    rows: of the call, per request.
    """
    name = type(module).__name__
    if dropout > 0.0 and module.training:
        return f"{name} asks for dropout {dropout}; call model.eval(), or train with 'sdpa'"
    causal = getattr(module, "is_causal", True)
    # Some models pass is_causal=False for a single row, because it sees every key.
    if not (causal if rows == 1 else others.get("is_causal", causal)):
        return f"{name} is not causal"
    if others.get("output_attentions"):
        return "output_attentions is not implemented"
    for argument, value in others.items():
        if argument not in _INERT and (isinstance(value, Tensor) or (value and argument in {"cache", "block_mask"})):
            return f"{name} hands down {argument!r}, which may change the result and is not implemented"
    return None

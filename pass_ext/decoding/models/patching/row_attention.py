"""Attention and masks of a transformers model while a generation has it: ours in our calls, the model's former ones elsewhere.

transformers finds an attention function and the function that makes its masks by a name in the model's config, which all
threads share. ``name_for(former)`` is such a name. Both functions behind it ask whether the call is ours (``our_call``, of this
thread alone); if not, they are those of ``former``, so that an ordinary call of the same model gives what it always gave.

In our calls a mask is no tensor but a ``RowMask``, which says the window. It is the mask that "eager" and "sdpa" obey, so it
rules; an attention call that says otherwise is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.packed import Attend
from pass_ext.decoding.models.patching.attention_arguments import unsupported
from pass_ext.decoding.models.patching.mask_patterns import window_conflict, window_of, window_text

KEY = "pass_ext_rows"
_formers: list[str] = []
"""``KEY_i`` stands for the i-th."""


class OurCall(NamedTuple):
    """A call of a model with a step's rows."""

    attend: Attend
    model: str
    """For messages."""
    kept: tuple[int, ...]
    """How many keys of a text transformers' own cache keeps in each layer; -1: all."""
    seen: Tensor
    """``[1, N]``, all True: the attention_mask that the model is given. Without one transformers takes rows whose positions
    do not rise by 1 for several packed texts and makes masks that keep these apart."""


_our_call: ContextVar[OurCall | None] = ContextVar("our_call", default=None)


class RowMask:
    """The mask of a step's rows: ``attend`` knows who sees whom, so only the window is left to say. It is no tensor: a model
    that computes with it is refused.

    Args:
        model: for messages.
        window: as ``attention_tree`` takes it: -1 is none.
        reason: why a layer cannot have this mask, to follow "the mask "; None: it can.
    """

    def __init__(self, model: str, window: int, reason: str | None = None) -> None:
        self.model, self.window, self.reason = model, window, reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        masks = [given for given in (*arguments, *(options or {}).values()) if isinstance(given, cls)]
        raise masks[0]._refusal() if masks else TypeError("an attention_mask of pass_ext.generate is no tensor")

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


@contextmanager
def our_call(attend: Attend, model: str, kept: tuple[int, ...], seen: Tensor) -> Iterator[None]:
    """Inside, in this thread, attention of attached models is ``attend``."""
    token = _our_call.set(OurCall(attend, model, kept, seen))
    try:
        yield
    finally:
        _our_call.reset(token)


def in_our_call() -> bool:
    """True inside of ``our_call``, in the same thread."""
    return _our_call.get() is not None


def name_for(former: str) -> str:
    """The name of our functions that are those of ``former`` outside of our calls; known to transformers from now on."""
    former = former_of(former)
    # Opaque: models look for "flash" in the name. Registered once: compiled models compare functions with those they met.
    if former not in _formers:
        _register(f"{KEY}_{len(_formers)}", former)
        _formers.append(former)
    return f"{KEY}_{_formers.index(former)}"


def _register(name: str, former: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    # Not to be compiled: a graph would keep the layer's number, or the thread, that it was made for.
    @torch.compiler.disable
    def attention(module: nn.Module, *tensors: Any, **options: Any) -> Any:
        call = _our_call.get()
        if call is None:
            return _former_attention(former, module)(*tensors, **options)
        return _row_attention(call, module, *tensors, **options), None

    @torch.compiler.disable
    def mask(**given: Any) -> Any:
        call = _our_call.get()
        return _former_mask(former, given) if call is None else _row_mask(call, given)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def former_of(name: str | None) -> str:
    """What the name stands for outside of our calls."""
    index = (name or "").removeprefix(KEY + "_")
    return _formers[int(index)] if index != (name or "") else name or "eager"


def _row_attention(
    call: OurCall,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> Tensor:
    """q, k, v ``[1, heads, N, D]`` -> ``[1, N, heads, D of v]``."""
    rows = query.shape[2]
    kept = dict(enumerate(call.kept)).get(module.layer_idx, -1)  # type: ignore[call-overload]
    window, reason = _window(module, attention_mask, rows, sliding_window, kept)
    reason = reason or unsupported(module, rows, dropout, others)
    if reason is not None:
        raise ValueError(
            f"pass_ext attention: {call.model}, layer {module.layer_idx}: {reason}, so pass_ext cannot decode this model"
        )
    return call.attend(
        module.layer_idx,  # type: ignore[arg-type]
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        scale=scaling,
        softcap=softcap or 0.0,
        window=window,
    )[None]


def _window(module: nn.Module, mask: Any, rows: int, sliding_window: int | None, kept: int) -> tuple[int, str | None]:
    """The layer's window, and why there is none to be had."""
    name, said, window = type(module).__name__, sliding_window or -1, -1
    if isinstance(mask, RowMask):
        if mask.reason is not None:
            return -1, f"the mask {mask.reason}"
        window = mask.window
    elif mask is not None and not _is_causal(mask, rows):
        return -1, f"{name} hands down an attention_mask of its own"
    conflict = window_conflict(module, None if said == -1 else said, window)
    if conflict is not None:
        return -1, conflict
    if kept >= 0 and not 0 <= window <= kept:  # also of a mask of the model's own, whose window a few rows do not show
        return -1, f"{name}'s mask has {window_text(window)}, but transformers' cache keeps the last {kept} keys"
    return window, None


def _is_causal(mask: Any, rows: int) -> bool:
    """True if a tensor says only that rows see those before them, as some models of transformers 4 make of a mask of ones."""
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (rows, rows) or not mask.is_floating_point():
        return False
    if _is_being_recorded(mask):
        return True
    hidden = mask < torch.finfo(mask.dtype).min / 2
    above = torch.ones(rows, rows, dtype=torch.bool, device=mask.device).triu(1)
    return bool((hidden == above).all() & (mask.masked_fill(above, 0) == 0).all())


def _row_mask(call: OurCall, given: dict[str, Any]) -> RowMask:
    """The mask of the layers of one kind. A reason is raised by a layer that is given it: some models make more masks than
    they use."""
    window = window_of(given["mask_function"])
    if window is None:
        return RowMask(call.model, -1, f"that {call.model} makes is neither causal nor a sliding window")
    if window == 0:
        return RowMask(call.model, -1, "hides every row, as its sliding_window is 0")
    if not _hides_nothing(given["attention_mask"], call.seen):
        return RowMask(call.model, -1, f"hides rows or keys: {call.model} changes the attention_mask that it is given")
    return RowMask(call.model, window)


def _hides_nothing(mask: Any, seen: Tensor) -> bool:
    """True for the ``seen`` that the model was given. Does not wait for the device where it is the very tensor."""
    if not isinstance(mask, Tensor) or mask.shape != seen.shape:
        return False
    return mask.data_ptr() == seen.data_ptr() or _is_being_recorded(mask) or bool(mask.all())


def _is_being_recorded(tensor: Tensor) -> bool:
    """True while a CUDA graph is made, when nobody can look at values; those of the call before, outside of it, were looked
    at."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _former_attention(former: str, module: nn.Module) -> Callable[..., Any]:
    """The function of that name as the model's own file finds it, with its first argument."""
    eager, interface = _of_file(type(module))  # type: ignore[arg-type]
    function = interface.get(former, eager)
    if function is None:
        raise RuntimeError(
            f"{type(module).__name__}: attention {former!r} was not found, so this model can be called by other threads "
            "only when no pass_ext generation uses it"
        )
    if "flash" in former:  # such functions look their own name up again
        module = copy.copy(module)
        config: Any = copy.copy(module.config)
        config._attn_implementation = {"": former}
        module.config = config
    return lambda *tensors, **options: function(module, *tensors, **options)


@lru_cache
def _of_file(kind: type) -> tuple[Callable[..., Any] | None, Any]:
    """The eager attention function, and the registered ones, that the methods of an attention layer refer to."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for base in kind.__mro__:
        for method in vars(base).values():
            function = inspect.unwrap(method) if isinstance(method, FunctionType) else None
            if not isinstance(function, FunctionType):
                continue
            for name in function.__code__.co_names:
                if name.endswith("eager_attention_forward"):
                    file = function.__globals__
                    return file.get(name), file.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return None, ALL_ATTENTION_FUNCTIONS


def _former_mask(former: str, given: dict[str, Any]) -> Any:
    """The mask that attention of that name gets, None where it gets none."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if former not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[former](**given)

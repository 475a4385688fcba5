"""``OneOrder``: inside it each row of what PyTorch computes has the bits that it has alone. For batch-invariant calls.

    products     ``linear_rows``, whose sums have one order: of linear layers, of routers, of each expert
    sums         ``linear_rows`` with a weight of ones, in float32: so means and softmax too; sums in float64 are refused
    functions    of single numbers, complex ones too: on the CPU by whole vectors, because PyTorch rounds the numbers after
                 these otherwise
    other work   copies, and results without floats: nothing is rounded

PyTorch chooses the order of a sum by the sizes of the tensors, so by the other rows of a call. Any other operation is refused
by its name, and that of the module. Compiled code runs uncompiled inside. Kernels that are called past PyTorch's dispatcher
(Triton's, or a library's by its own binding) are not seen.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from pass_ext.decoding.models.product_times import FLOATS
from pass_ext.ops import linear  # noqa: F401, which registers the op
from pass_ext.weights.layers import Packed

_linear = torch.ops.pass_ext.linear_rows.default
_REFUSED = "Session: batch_invariant must be False for this model"


class OneOrder(TorchDispatchMode):
    """The mode."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _PLAIN.issuperset(types):  # a tensor of another class works by operations that come here in turn
            return NotImplemented
        try:
            return _served(func, args, kwargs or {})
        except _Other as error:
            raise _refusal(func) from error


def _served(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    ours = _OURS.get(func._opname) if func.namespace in ("aten", "transformers") else None
    if ours is not None and any(map(_is_float, args)):
        if not _takes(ours, len(args), frozenset(named)):
            raise _Other
        return ours(*args, **named)
    if _copies(func, named):
        return func(*args, **named)
    if _is_of_single_numbers(func):
        return _by_whole_vectors(func, args, named)
    out = func(*args, **named)
    if any(map(_is_float, tree_leaves([out, _written(func, args, named)]))):
        raise _Other
    return out


def any_order() -> AbstractContextManager[Any]:
    """Inside, PyTorch computes as ever, in ``OneOrder`` too: for comparisons, whose numbers reach no text."""
    return _pop_mode_temporarily() if isinstance(_get_current_dispatch_mode(), OneOrder) else nullcontext()


class _Other(Exception):
    """An operation in a form that is not served."""


def _refusal(func: Any) -> ValueError:
    return ValueError(
        f"{_REFUSED}: {_caller()} calls {func}, and a row of its result may depend on the other rows of a call"
    )


def _caller() -> str:
    """The class of the module whose code is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return "the model"


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


@cache
def _takes(ours: Callable[..., Tensor], count: int, names: frozenset[str]) -> bool:
    try:
        inspect.signature(ours).bind(*range(count), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def _written(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Arguments into which an operation writes, which may return nothing."""
    arguments = func._schema.arguments
    given = {**{x.name: value for x, value in zip(arguments, args, strict=False)}, **named}
    return [given.get(x.name) for x in arguments if x.alias_info is not None and x.alias_info.is_write]


# ---- what the mode does not see ----

_NUMBERS = (*FLOATS, torch.float64, torch.complex64, torch.int64, torch.bool)
_EXPERTS = (None, "eager", "grouped_mm", "batched_mm")  # PyTorch's products
_PLAIN = frozenset({Tensor, nn.Parameter})


def check_seen(model: Any) -> None:
    """Refuses a model whose products other libraries compute: with weights that are codes, but for ours, or of another class
    than PyTorch's, or with other kernels for experts than PyTorch's."""
    for name, part in model.named_modules() if isinstance(model, nn.Module) else ():
        experts = getattr(getattr(part, "config", None), "_experts_implementation", None)
        reason = None if experts in _EXPERTS else f"computes experts by {experts}"
        for weight in () if isinstance(part, Packed) else (*part._parameters.values(), *part._buffers.values()):
            if weight is not None and weight.dim() > 1 and not _are_numbers(weight):
                reason = f"has a weight of the class {type(weight).__name__} in {weight.dtype}"
        if reason is not None:
            place = f"{name} ({type(part).__name__})" if name else type(part).__name__
            raise ValueError(f"{_REFUSED}: {place} {reason}, and its products may depend on the other rows of a call")


def _are_numbers(weight: Tensor) -> bool:
    return type(weight) in _PLAIN and weight.dtype in _NUMBERS


# ---- functions of single numbers ----

_ROUNDED_ONCE = frozenset({
    "abs", "add", "ceil", "clamp", "clamp_max", "clamp_min", "copysign", "div", "eq", "floor", "fmax", "fmin", "ge", "gt",
    "hardtanh", "heaviside", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "le", "logical_and", "logical_not",
    "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul", "nan_to_num", "ne", "neg", "reciprocal", "relu", "round",
    "rsub", "sgn", "sign", "signbit", "sqrt", "sub", "threshold", "trunc", "where",
})  # fmt: skip
_VECTORS = 64  # numbers, in any dtype on any processor
_OF_ONE_THREAD = 1 << 15  # numbers: where threads divide more, vectors end at other places


@cache
def _is_of_single_numbers(func: Any) -> bool:
    is_pointwise = torch.Tag.pointwise in func.tags or func._opname in ("complex", "polar")
    return func.namespace == "aten" and is_pointwise and [str(x.type) for x in func._schema.returns] == ["Tensor"]


def _by_whole_vectors(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    tensors = [x for x in args if isinstance(x, Tensor)]
    name = func._opname.rstrip("_")
    is_exact = name in _ROUNDED_ONCE and not ({"alpha", "rounding_mode", "decimals"} & named.keys())
    is_exact = is_exact and not any(x.is_complex() for x in tensors)
    is_on_cpu = all(x.is_cpu for x in tensors) and any(map(_is_float, tensors))
    if is_exact or not is_on_cpu:
        return func(*args, **named)
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    count = math.prod(shape)
    if not shape or not count:
        return func(*args, **named)
    flat = [  # copies, into which a function may write; of a single number the dtype does not count as others' does
        functional.pad(x.expand(shape).reshape(-1), (0, -count % _VECTORS), value=1) if _has_axes(x) else x
        for x in args
    ]
    to = named.get("out", args[0] if name != func._opname else None)
    parts = [
        func(
            *(x[first : first + _OF_ONE_THREAD] if _has_axes(x) else x for x in flat),
            **{**named, "out": to.new_empty(0)} if "out" in named else named,
        )
        for first in range(0, count, _OF_ONE_THREAD)
    ]
    out = torch.cat(parts)[:count].view(shape)
    if to is None:
        return out
    return (to.resize_(shape) if "out" in named else to).copy_(out)


def _has_axes(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


# ---- copies ----

_COPIES = frozenset({
    "_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy_", "embedding", "fill_", "flip", "gather", "index",
    "index_copy_", "index_select", "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select",
    "repeat", "roll", "scatter", "scatter_", "select_scatter", "slice_scatter", "split_with_sizes_copy", "stack", "tril",
    "triu", "zero_",
    "amax", "amin", "max", "min", "sort", "topk",
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "new_empty", "new_empty_strided",
    "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like",
    "histc",  # counts, which are exact
    "native_layer_norm", "_fused_rms_norm",  # PyTorch's kernels take whole rows, each by itself
})  # fmt: skip


def _copies(func: Any, named: Mapping[str, Any]) -> bool:
    if func.namespace == "aten":
        return func.is_view or (func._opname in _COPIES and "reduce" not in named)  # scatter may add up
    return func.namespace in ("pass_ext", "prim", "profiler")


# ---- products ----


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b.t())


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if rows.dtype not in FLOATS:
        raise _Other
    return _linear(rows, weight if weight.stride(1) == 1 else weight.contiguous(), bias)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.shape == b.shape[1:] and beta == alpha == 1:
        return _product(a, b.t(), bias)
    return beta * bias + alpha * _mm(a, b)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    for i in range(len(a)):
        out[i] = _mm(a[i], b[i])
    return out


def _baddbmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * added + alpha * _bmm(a, b)


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: None = None, out_dtype: None = None) -> Tensor:
    """Rows of expert e, from ``offs[e - 1]`` to ``offs[e]``, by ``b[e]`` ``[in, out]``. The host reads ``offs``."""
    if a.dim() != 2 or b.dim() != 3 or offs is None or bias is not None or out_dtype not in (None, a.dtype):
        raise _Other
    out, begin = a.new_zeros(len(a), b.shape[2]), 0
    for expert, end in enumerate(offs.tolist()):
        if end > begin:
            out[begin:end] = _mm(a[begin:end], b[expert])
        begin = end
    return out


# ---- sums ----


def _sum(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return _total(x, dim, keepdim, dtype)[0].to(dtype or x.dtype)


def _mean(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    total, count = _total(x, dim, keepdim, dtype)
    return (total / count).to(dtype or x.dtype)


def _total(x: Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None = None) -> tuple[Tensor, int]:
    """Sums in float32, and the count of numbers of each."""
    if not {x.dtype, dtype or x.dtype}.issubset(FLOATS):
        raise _Other
    dims = sorted({i % x.dim() for i in dim or range(x.dim())}) if x.dim() else []
    kept = [i for i in range(x.dim()) if i not in dims]
    count = math.prod(x.shape[i] for i in dims)
    rows = x.permute([*kept, *dims]).reshape([*(x.shape[i] for i in kept), count])
    total = _product(rows.float(), rows.new_ones(1, count, dtype=torch.float32))[..., 0]
    for i in dims if keepdim else ():
        total = total.unsqueeze(i)
    return total, count


def _norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if ord not in (1, 2) or x.dtype not in FLOATS:
        raise _Other
    numbers = x.float()
    total = _total(numbers.abs() if ord == 1 else numbers * numbers, dim, keepdim, dtype)[0]
    return (total if ord == 1 else total.sqrt()).to(dtype or x.dtype)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if x.dtype not in FLOATS:
        raise _Other
    numbers = x.float()
    weights = (numbers - numbers.amax(dim, keepdim=True)).exp()
    return (weights / _total(weights, [dim], True)[0]).to(torch.float32 if half_to_float else x.dtype)


def _index_put_(to: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    if accumulate:
        raise _Other
    return to.index_put_(indices, values)


def _index_add_(to: Tensor, dim: int, index: Tensor, rows: Tensor, *, alpha: float = 1) -> Tensor:
    if to.is_cpu:
        return torch.ops.aten.index_add_.default(to, dim, index, rows, alpha=alpha)
    if dim:
        raise _Other
    return to.index_put_((index,), rows * alpha, accumulate=True)  # on a GPU this one adds in the order of the rows


def _index_add(to: Tensor, dim: int, index: Tensor, rows: Tensor, *, alpha: float = 1) -> Tensor:
    return _index_add_(to.clone(), dim, index, rows, alpha=alpha)


_OURS: dict[str, Callable[..., Tensor]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "_grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
    "sum": _sum,
    "mean": _mean,
    "linalg_vector_norm": _norm,
    "_softmax": _softmax,
    "index_put_": _index_put_,
    "index_add_": _index_add_,
    "index_add": _index_add,
}

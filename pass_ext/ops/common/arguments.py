"""Arguments of ops in the form that kernels read.

``integers``           bounds, parents, lengths, tokens, paths, pages: any integer dtype, never rounded or wrapped
``parameter_tensor``   sampling parameters by request or row: a tensor, a list, one number for all, or None
``index_of``           the name of an option
``typed``              names the argument of a public op that has a wrong type. It looks only after the op has failed, so a good
                       call pays for one more Python frame.

On the CPU a number that does not fit the kernel's dtype is refused. On CUDA a check would need a synchronisation, and under
torch.compile there is no value to check: the number is clamped to the dtype's lowest or highest. That is out of range for every
op too.
"""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints, overload

import torch
from torch import Tensor

Parameter = Tensor | Sequence[float] | float | int | None
SAMPLING = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
"""The sampling parameters of ops, in their order."""

P = ParamSpec("P")
R = TypeVar("R")

_OWN_WORDS = re.compile(r"pass_ext(::|\.distributed\.)\w+: ")
_FAILURES = (AttributeError, IndexError, NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError)


@overload
def integers(op: str, argument: str, tensor: Tensor, dtype: torch.dtype = torch.int32) -> Tensor: ...
@overload
def integers(op: str, argument: str, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None: ...
def integers(op: str, argument: str, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
    """The tensor in ``dtype``, or the tensor itself if it has that dtype. A tensor of floats or bools is returned unchanged:
    the op refuses it and names its dtype."""
    if tensor is None or tensor.dtype is dtype:
        return tensor
    if tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex():
        return tensor
    limits = torch.iinfo(dtype)
    wide = tensor.to(torch.int64)
    if tensor.dtype is torch.uint64:  # in int64, numbers of 2^63 and more are negative
        too_low, too_high = torch.zeros_like(wide, dtype=torch.bool), (wide < 0) | (wide > limits.max)
    else:
        too_low, too_high = wide < limits.min, wide > limits.max
    if _can_be_read(tensor):
        bad = (too_low | too_high).flatten()
        if bool(bad.any()):
            index = int(bad.nonzero()[0])
            raise ValueError(
                f"pass_ext::{op}: {argument} must fit {str(dtype).removeprefix('torch.')}, in [{limits.min}, {limits.max}], "
                f"got {tensor.flatten()[index].item()} at flat index {index}"
            )
    else:
        wide = torch.where(too_high, limits.max, torch.where(too_low, limits.min, wide))
    return wide.to(dtype).contiguous()


def _can_be_read(tensor: Tensor) -> bool:
    """True if the values can be read without a synchronisation: a plain CPU tensor, not traced, fake or vmapped."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def parameter_tensor(
    op: str, argument: str, value: Parameter, rows: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The parameter as a contiguous tensor in ``dtype``; None stays None. The op itself checks a tensor's shape."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return _of_tensor(op, argument, value, rows, dtype, device)
    if isinstance(value, (list, tuple)):
        return torch.tensor([_number(op, argument, number, dtype) for number in value], dtype=dtype, device=device)
    return torch.full((rows,), _number(op, argument, value, dtype), dtype=dtype, device=device)


def _of_tensor(op: str, argument: str, value: Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not dtype.is_floating_point:
        value = integers(op, argument, value, dtype)
    elif value.dtype is not dtype and not value.is_complex() and value.dtype is not torch.bool:
        value = value.to(dtype)
    if value.dim() == 0:  # one number for all; like torch's ops, accept it from the CPU too
        value = value.to(device).expand(rows)
    return value.contiguous()


def _number(op: str, argument: str, value: Any, dtype: torch.dtype) -> Any:
    """The number, if the dtype can hold it."""
    if dtype.is_floating_point:
        try:
            return float(value) if not isinstance(value, (str, bytes)) else _refuse(op, argument, "numbers", value)
        except (OverflowError, TypeError):
            return _refuse(op, argument, "numbers", value)
    if isinstance(value, bool):
        return _refuse(op, argument, "integers", value)
    if not isinstance(value, int):
        try:
            value = operator.index(value)
        except TypeError:
            return _refuse(op, argument, "integers", value)
    limits = torch.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        raise ValueError(f"pass_ext::{op}: {argument} must be in [{limits.min}, {limits.max}], got {value}")
    return value


def _refuse(op: str, argument: str, kind: str, value: Any) -> None:
    raise TypeError(
        f"pass_ext::{op}: {argument} must be {kind} (a tensor, a list, or one for all), got {value!r} of type "
        f"{type(value).__name__}"
    )


def sampling_tensors(
    op: str, values: Sequence[Parameter], rows: int, device: torch.device, names: Mapping[str, torch.dtype] = SAMPLING
) -> list[Tensor | None]:
    """Temperature, top_k, top_p and min_p as tensors, or the parameters of ``names``."""
    return [
        parameter_tensor(op, name, value, rows, dtype, device)
        for (name, dtype), value in zip(names.items(), values, strict=True)
    ]


def target_and_draft(
    op: str, target: Sequence[Parameter], draft: Sequence[Parameter], rows: int, device: torch.device
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The sampling parameters of target and draft as tensors, four each. A draft parameter of None is the target's."""
    of_target = sampling_tensors(op, target, rows, device)
    names = {f"draft_{name}": dtype for name, dtype in SAMPLING.items()}
    of_draft = sampling_tensors(op, draft, rows, device, names)
    return of_target, [
        own if value is None else its for value, its, own in zip(draft, of_draft, of_target, strict=True)
    ]


def seeds_for(
    op: str, seeds: Parameter, rows: int, device: torch.device, generator: torch.Generator | None
) -> Tensor | None:
    """The seeds as a tensor; None: fresh seeds from ``generator``, or from torch's default generator of the device."""
    if seeds is None:
        return torch.randint(-(2**63), 2**63 - 1, (rows,), device=device, generator=generator)
    return parameter_tensor(op, "seeds", seeds, rows, torch.int64, device)


def is_greedy(temperature: Parameter) -> bool:
    """True if the host knows that all rows are greedy: no temperature, or numbers that are 0 or below."""
    if temperature is None:
        return True
    if isinstance(temperature, Tensor):
        return False
    numbers: Sequence[float] = temperature if isinstance(temperature, Sequence) else [temperature]
    return all(not number > 0 for number in numbers)


def check_positions(function: str, seeds: Parameter, positions: Parameter, *, draws: bool) -> None:
    """Raises ValueError for seeds without positions where noise is drawn: it would be the same at every step."""
    if draws and seeds is not None and positions is None:
        raise ValueError(
            f"{function}: positions must be given with seeds unless the temperature is 0, because the same seeds give the same "
            "noise wherever a text is, got None; pass the text position of the token that is drawn next, for each request the "
            "number of tokens that its text has so far"
        )


def index_of(op: str, argument: str, name: str, names: tuple[str, ...]) -> int:
    """The index of an option's name, as ops take it; refuses an unknown one."""
    if name not in names:
        raise ValueError(f"pass_ext::{op}: {argument} must be one of {', '.join(names)}, got {name!r}")
    return names.index(name)


def typed(prefix: str, page: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a public op, which messages call ``prefix`` and its own name. They end with the page that has its contract."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*values: P.args, **named: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return function(*values, **named)
            try:
                return function(*values, **named)
            except _FAILURES as error:
                refusal = error
                if not _OWN_WORDS.match(str(error)):
                    refusal = _wrong_type(f"{prefix}{function.__name__}", function, values, named) or error
                if _OWN_WORDS.match(str(refusal)) and not str(refusal).endswith(".md]"):  # of an op within this one
                    refusal.args = (f"{refusal} [docs/{page}.md]",)
                if refusal is error:
                    raise
                raise refusal from None

        return checked

    return decorate


def _wrong_type(
    op: str, function: Callable[..., Any], values: tuple[Any, ...], named: dict[str, Any]
) -> TypeError | RuntimeError | None:
    """The refusal of the first argument that is not of its type; None if all are, or if one is missing."""
    try:
        given = inspect.signature(function).bind(*values, **named).arguments
    except TypeError:
        return None
    hints = get_type_hints(function)
    for argument, value in given.items():
        hint = hints[argument]
        if hint == Parameter:  # parameter_tensor checks it
            continue
        kinds = [_kind(each) for each in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
        if not any(fits(value) for _, fits in kinds):
            shown = repr(value)
            return TypeError(
                f"{op}: {argument} must be {' or '.join(words for words, _ in kinds)}, got "
                f"{shown if len(shown) <= 60 else f'{shown[:60]}…'} of type {type(value).__name__}"
            )
        if isinstance(value, Tensor) and value.dim() == 0:
            return RuntimeError(f"{op}: {argument} must have dimensions, got a single number of {value.dtype}")
    return None


def _kind(hint: Any) -> tuple[str, Callable[[Any], bool]]:
    """A type in words, and what a value of it fulfils."""
    if get_origin(hint) in (Sequence, Mapping):
        inner = [_kind(each)[1] for each in get_args(hint)]
        if get_origin(hint) is Mapping:
            return "a dictionary", lambda value: isinstance(value, Mapping)
        return "a list", lambda value: isinstance(value, (list, tuple)) and all(inner[0](item) for item in value)
    if hint is int:
        return "an integer of 64 bits", lambda value: type(value) is int and -(2**63) <= value < 2**63
    if hint is float:
        return "a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is type(None):
        return "None", lambda value: value is None
    if get_origin(hint) is tuple:
        return "a pair", lambda value: isinstance(value, tuple) and len(value) == len(get_args(hint))
    names = {Tensor: "a tensor", bool: "True or False", str: "a string", torch.dtype: "a dtype"}
    return names.get(hint, getattr(hint, "__name__", str(hint))), lambda value: isinstance(value, hint)

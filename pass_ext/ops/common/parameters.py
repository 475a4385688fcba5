"""Converts per-request and per-row parameters of the sampling ops (a tensor, a list, one number for all, or None), and names of
options.

Integer parameters are never rounded or wrapped: a float and a number outside the kernel's dtype are refused.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.ops.common.integers import integers

Parameter = Tensor | Sequence[float] | float | int | None


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

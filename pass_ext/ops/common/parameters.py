"""One number per request or per row, as the sampling ops take them: a tensor, a list, one number for all, or None.

Integers are never cut: a float, and a number outside the dtype that the kernel reads, is refused.
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
    """The parameter as the kernels read it; None stays None. What a tensor's shape must be, they check themselves."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return _of_tensor(op, argument, value, rows, dtype, device)
    if isinstance(value, (list, tuple)):
        return torch.tensor([_number(op, argument, each, dtype) for each in value], dtype=dtype, device=device)
    return torch.full((rows,), _number(op, argument, value, dtype), dtype=dtype, device=device)


def _of_tensor(op: str, argument: str, value: Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not dtype.is_floating_point:
        value = integers(op, argument, value, dtype)
    elif value.dtype is not dtype and not value.is_complex() and value.dtype is not torch.bool:
        value = value.to(dtype)
    if value.dim() == 0:  # one number for all, as torch's own ops take it: from the CPU too
        value = value.to(device).expand(rows)
    return value.contiguous()


def _number(op: str, argument: str, value: Any, dtype: torch.dtype) -> Any:
    """The number, if the dtype can hold it."""
    if dtype.is_floating_point:
        if isinstance(value, (int, float)):
            return value
        try:
            return float(value) if not isinstance(value, str) else _refuse(op, argument, "numbers", value)
        except TypeError:
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


def _refuse(op: str, argument: str, wanted: str, value: Any) -> None:
    raise TypeError(
        f"pass_ext::{op}: {argument} must be {wanted} (a tensor, a list, or one for all), got {value!r} of type "
        f"{type(value).__name__}"
    )


def seeds_for(
    op: str, seeds: Parameter, rows: int, device: torch.device, generator: torch.Generator | None
) -> Tensor | None:
    """The caller's seeds, or fresh ones from a generator: torch's own for the device where none is given."""
    if seeds is None:
        return torch.randint(-(2**63), 2**63 - 1, (rows,), device=device, generator=generator)
    return parameter_tensor(op, "seeds", seeds, rows, torch.int64, device)

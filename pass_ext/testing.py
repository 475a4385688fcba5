"""``Backend``: a way to run the ops, with its name and torch device: the CPU at one instruction set, the emulator, or CUDA.

One test body runs on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pass_ext import _library


@dataclass(frozen=True)
class Backend:
    """One way to run the ops; ``with backend.active():`` makes it the one in use."""

    name: str
    device: torch.device
    active: Callable[[], AbstractContextManager[None]]

    def __str__(self) -> str:
        return self.name


class _RerouteOps(TorchDispatchMode):
    """Sends ``torch.ops.pass_ext.<name>`` to ``kernels[name]``, below autograd, above the dispatcher's own kernels."""

    def __init__(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace != _library.NAMESPACE:
            return func(*args, **(kwargs or {}))
        return self.kernels[func._opname](*args, **(kwargs or {}))


def cpu_backends() -> list[Backend]:
    """The CPU kernels at every instruction set that this processor has."""
    best = _library.limit_cpu_isa("")
    return [_limited_backend(isa) for isa in _library.CPU_ISAS[: _library.CPU_ISAS.index(best) + 1]]


def tile_backends() -> list[Backend]:
    """The CPU kernels with products of bfloat16 weights by tiles: emulated ones, and the processor's if it has them."""
    emulated, real = _limited_backend("amx_emulated"), _limited_backend("amx")
    with real.active():
        return [emulated, real] if _library.status().cpu_products == "amx" else [emulated]


def _limited_backend(limit: str) -> Backend:
    @contextmanager
    def limited() -> Iterator[None]:
        _library.limit_cpu_isa(limit)
        try:
            yield
        finally:
            _library.limit_cpu_isa("")

    return Backend(f"cpu-{limit}", torch.device("cpu"), limited)


def rerouted_backend(name: str, kernels: Mapping[str, Callable[..., Any]]) -> Backend:
    """A backend whose kernels are Python functions on CPU tensors, by op name, such as the emulator's."""

    @contextmanager
    def rerouted() -> Iterator[None]:
        with _RerouteOps(kernels):
            yield

    return Backend(name, torch.device("cpu"), rerouted)


def cuda_backends() -> list[Backend]:
    """CUDA, if torch sees a GPU and the CUDA kernels are loaded."""
    if not (torch.version.cuda and torch.cuda.is_available() and _library.status().cuda_loaded):
        return []
    return [Backend("cuda", torch.device("cuda"), nullcontext)]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal in dtype, shape and every bit, NaN included; the message names the first place that differs."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    different = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    if bool(different.any()):
        place = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(different.sum())} of {different.numel()} elements differ, first at {place}: "
            f"{actual[place].item()!r}, expected {expected[place].item()!r}"
        )


def assert_error_within(actual: Tensor, plain: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """The error rule of this project: an error of at most ``factor`` times that of plain PyTorch in the same precision, each
    against an fp64 result. One unit in the last place of the largest element is always allowed: an exact ``plain`` does not
    forbid rounding."""
    assert torch.isfinite(exact).all(), "the exact result must be finite for its error to mean anything"
    error = (actual.double().cpu() - exact.cpu()).abs().max().item()
    allowed = (plain.double().cpu() - exact.cpu()).abs().max().item()
    step = torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert error <= max(factor * allowed, step), f"error {error:.3e}, plain PyTorch in the same precision {allowed:.3e}"

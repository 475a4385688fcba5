"""``few_rows_linear``: replaces the forward of a model's linear layers by ``pass_ext::linear_rows``, inside a context.

A decoding step has some dozens of rows at most, and PyTorch's matrix product is slow for few rows on the CPU; without
instructions for bf16 or fp16 for any number of them. On a GPU it is not, but small weights are read in less time than a launch
takes, and the layer ops, which need fewer launches, have the bits of ``linear_rows``.
"""

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.plain_tensors import is_plain
from pass_ext.ops import linear  # noqa: F401, which registers the op


@lru_cache
def most_few_rows(dtype: torch.dtype, is_cpu: bool) -> int:
    """With more rows ``torch.nn.functional.linear`` may be faster."""
    if not is_cpu or platform.machine() not in ("x86_64", "AMD64"):
        return 64
    if dtype is torch.float32:
        return 256
    if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return 64
    if dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return 192
    if dtype is torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return 64
    return sys.maxsize  # PyTorch converts the weights in each call


def are_few(rows: int, most: int, slot_rows: int = 0) -> bool:
    """True for at most so many rows, look-ahead slots' not counted: so a prompt has the same bits with slots behind it as
    without."""
    return rows - slot_rows <= most


MOST_BYTES_ON_CUDA = 8 << 20
"""A heavier weight keeps PyTorch's product on a GPU: it is read for longer than a launch takes, and no GPU has compared the
two."""

_op = torch.ops.pass_ext.linear_rows.default


@contextmanager
def few_rows_linear(module: nn.Module, takes: Callable[[int, int], bool] = are_few) -> Iterator[None]:
    """Inside, every plain ``nn.Linear`` of the module computes rows by ``linear_rows`` if ``takes(rows, most_few_rows(...))``.
    Others, and calls that record gradients or are compiled, use ``torch.nn.functional.linear`` as before.

    Plain means: exactly this type, without hooks, without a replaced ``forward`` (wrapped layers, and those of an outer
    ``few_rows_linear``, stay as they are), and with plain weights (``is_plain``) in bfloat16, float16 or float32, on the CPU
    or, up to ``MOST_BYTES_ON_CUDA``, on a GPU. Weights that are replaced inside the context are used, by
    ``torch.nn.functional.linear``. Under autocast nothing changes. The layers are restored at the end, also after an error.
    """
    changed: list[nn.Linear] = []
    try:
        if not is_autocast_enabled():
            for layer in module.modules():
                if is_plain_linear(layer):
                    layer.forward = _forward(layer, takes)  # type: ignore[method-assign, assignment]
                    changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def is_autocast_enabled() -> bool:
    """True under autocast of any device that has our kernels."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def is_plain_linear(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """True for exactly an ``nn.Linear`` without hooks, without a forward of its own, and with plain weights that
    ``linear_rows`` takes and computes quickly."""
    if type(layer) is not nn.Linear:
        return False
    weight = layer._parameters.get("weight")  # missing where a parametrization computes it
    return (
        weight is not None
        and is_plain(weight)
        and (weight.is_cpu or (weight.is_cuda and weight.nbytes <= MOST_BYTES_ON_CUDA))
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (layer.bias is None or (is_plain(layer.bias) and layer.bias.dtype == weight.dtype))
        and (weight.shape[1] < 2 or weight.stride(1) == 1)
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )


def _forward(layer: nn.Linear, takes: Callable[[int, int], bool]) -> Callable[[Tensor], Tensor]:
    """The forward of a plain layer: ``linear_rows`` for rows that it takes, ``torch.nn.functional.linear`` otherwise."""
    # Looking up `layer.weight` in each call would cost as much as a small product. The dictionary is quick to read, and shows
    # whether a weight was replaced.
    parameters = layer._parameters
    weight, bias, dtype, width = layer.weight, layer.bias, layer.weight.dtype, max(1, layer.in_features)
    is_cpu = weight.is_cpu
    most = most_few_rows(dtype, is_cpu)

    def forward(input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a compiled graph would never call `when` again
            return functional.linear(input, layer.weight, layer.bias)
        if (
            input.dtype is dtype
            and input.is_cpu is is_cpu
            and parameters.get("weight") is weight
            and parameters.get("bias") is bias
            and not torch.is_grad_enabled()
            and takes(input.numel() // width, most)
        ):
            return _op(input, weight, bias)
        return functional.linear(input, layer.weight, layer.bias)

    return forward

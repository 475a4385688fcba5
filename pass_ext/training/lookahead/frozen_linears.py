"""Linear layers of a frozen model whose weights are quantised (torchao, 4 bits of bitsandbytes) or offloaded by accelerate, in
training: the gradient reads the weight again, so that the forward keeps none in full precision.

y = forward(x),  dx = dy W
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def weights_read_again(decoder: nn.Module) -> Iterator[None]:
    """Inside, such layers of the decoder keep nothing for their gradient."""
    changed = []
    try:
        for module in decoder.modules():
            read = _reader(module) if isinstance(module, nn.Linear) else None
            if read is not None:
                changed.append((module, vars(module).get("forward")))
                module.forward = partial(_Reading.apply, module.forward, read)
        yield
    finally:
        for module, forward in changed:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _reader(module: nn.Linear) -> Callable[[], Tensor] | None:
    """What gives the weight in full precision; None: it is there as it is, or the layer has a gradient of its own."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]):
        if getattr(one, "offload", False):
            return partial(_loaded, one)
    state = getattr(module.weight, "quant_state", None)
    if state is not None:  # the products of few rows have no gradient
        from bitsandbytes.functional import dequantize_4bit

        if getattr(state, "packing_format_for_cpu", False):
            raise SystemExit(
                "--model-args: bitsandbytes has packed its 4 bits for a CPU's products: take torchao's 4 bits"
            )
        return partial(dequantize_4bit, module.weight.data, state)
    dequantize = getattr(module.weight, "dequantize", None)
    return dequantize if hasattr(module.weight, "__tensor_flatten__") else None


def _loaded(hook: Any) -> Tensor:
    weight: Tensor = hook.weights_map["weight"].to(hook.execution_device)
    return weight


class _Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[[Tensor], Tensor], read: Callable[[], Tensor], x: Tensor) -> Tensor:
        ctx.read = read
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, gradient @ ctx.read().to(gradient.dtype)

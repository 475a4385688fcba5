"""``few_rows_linear``: a model's linear layers compute through ``pass_ext::linear_rows`` for a while.

A decoding step has some dozens of rows at most, and PyTorch's own product of few rows is slow on the CPU. Called by what
attaches a model for a generation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.ops import linear  # noqa: F401, which registers the op

MOST_ROWS = 64
"""With more, ``torch.nn.functional.linear`` may be faster."""

_op = torch.ops.pass_ext.linear_rows.default


@contextmanager
def few_rows_linear(module: nn.Module, when: Callable[[], bool] | None = None) -> Iterator[None]:
    """Inside, every plain ``nn.Linear`` of the module that is on the CPU takes at most ``MOST_ROWS`` rows at a time through
    ``linear_rows``; more rows, calls that record gradients or are compiled, and those for which ``when()`` is False go to
    ``torch.nn.functional.linear`` as before.

    Plain: that very type, no hooks of its own, no ``forward`` of its own (what wraps layers, and an outer ``with`` like this,
    keep theirs), in bfloat16, float16 or float32. Nothing under autocast. Restored at the end, whatever happens.
    """
    changed: list[nn.Linear] = []
    try:
        if not torch.is_autocast_enabled("cpu"):
            for layer in module.modules():
                if type(layer) is nn.Linear and _is_plain(layer):
                    layer.forward = _forward(layer, when)  # type: ignore[method-assign, assignment]
                    changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def _is_plain(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (layer.bias is None or layer.bias.dtype == weight.dtype)
        and (weight.shape[1] < 2 or weight.stride(1) == 1)
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )


def _forward(layer: nn.Linear, when: Callable[[], bool] | None) -> Callable[[Tensor], Tensor]:
    # Held here: a look-up of a parameter costs as much as a small product.
    weight, bias, dtype, most = layer.weight, layer.bias, layer.weight.dtype, MOST_ROWS * layer.in_features

    def forward(input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a graph would not ask `when` again
            return functional.linear(input, weight, bias)
        if input.numel() <= most and input.dtype is dtype and not torch.is_grad_enabled() and (when is None or when()):
            return _op(input, weight, bias)
        return functional.linear(input, weight, bias)

    return forward

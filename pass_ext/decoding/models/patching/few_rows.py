"""``few_rows_linear``: lets a model's linear layers compute through ``pass_ext::linear_rows`` for a while.

A decoding step has some dozens of rows at most, and PyTorch's own product of few rows is slow on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.plain_tensors import is_plain
from pass_ext.ops import linear  # noqa: F401, which registers the op

MAX_FEW_ROWS = 64
"""With more, ``torch.nn.functional.linear`` may be faster."""

_op = torch.ops.pass_ext.linear_rows.default


@contextmanager
def few_rows_linear(module: nn.Module, when: Callable[[], bool] | None = None) -> Iterator[None]:
    """Inside, every plain ``nn.Linear`` of the module that is on the CPU takes at most ``MAX_FEW_ROWS`` rows at a time through
    ``linear_rows``; more rows, calls that record gradients or are compiled, and those for which ``when()`` is False go to
    ``torch.nn.functional.linear`` as before.

    Plain: that very type, no hooks of its own, no ``forward`` of its own (what wraps layers, and an outer ``with`` like this,
    keep theirs), weights that are plain tensors (``is_plain``) in bfloat16, float16 or float32. Weights that replace them
    meanwhile are used, by ``torch.nn.functional.linear``. Nothing under autocast. Restored at the end, whatever happens.
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
    weight = layer._parameters.get("weight")  # a parametrization puts it elsewhere
    return (
        weight is not None
        and is_plain(weight)
        and weight.device.type == "cpu"
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (layer.bias is None or (is_plain(layer.bias) and layer.bias.dtype == weight.dtype))
        and (weight.shape[1] < 2 or weight.stride(1) == 1)
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )


def _forward(layer: nn.Linear, when: Callable[[], bool] | None) -> Callable[[Tensor], Tensor]:
    # Held here: `layer.weight` costs as much as a small product. The dictionary is quick, and shows a weight that was replaced.
    parameters = layer._parameters
    weight, bias, dtype, most = layer.weight, layer.bias, layer.weight.dtype, MAX_FEW_ROWS * layer.in_features

    def forward(input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a graph would not ask `when` again
            return functional.linear(input, layer.weight, layer.bias)
        if (
            input.numel() <= most
            and input.dtype is dtype
            and input.is_cpu
            and parameters.get("weight") is weight
            and parameters.get("bias") is bias
            and not torch.is_grad_enabled()
            and (when is None or when())
        ):
            return _op(input, weight, bias)
        return functional.linear(input, layer.weight, layer.bias)

    return forward

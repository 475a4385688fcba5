"""``linear_rows``: a linear layer for the few rows of a decoding step, on the CPU.

out[r] = weight @ x[r] + bias. Kernel: csrc/cpu/linear.cpp.
"""

import torch
from torch import Tensor

from pass_ext.ops.common.fakes import register_fake
from pass_ext.ops.common.nondifferentiable import call

_op = torch.ops.pass_ext.linear_rows.default


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` for up to some dozens of rows on the CPU: reads the weight once, whatever their number.

    Args:
        x: ``[..., in]`` bfloat16, float16 or float32.
        weight: ``[out, in]`` in x's dtype; rows may be strided, each row contiguous.
        bias: ``[out]`` in x's dtype.

    Returns:
        ``[..., out]`` in x's dtype; products and sums are fp32, rounded once.

    A row's result has the same bits whatever the other rows are, how many there are, and how many threads compute them
    (on one instruction set). So a token decoded in a batch of drafts meets the same numbers as one decoded alone.

    For the CPU only: CUDA's own matrix product is right there. Many rows (more than 64) are right, but
    ``torch.nn.functional.linear`` may be faster. No gradients, reverse or forward: it raises where one is wanted.
    """
    if torch.is_grad_enabled() and any(given is not None and given.requires_grad for given in (x, weight, bias)):
        raise RuntimeError(
            "pass_ext::linear_rows: no gradient is implemented, but an input requires one; call it under torch.no_grad()"
        )
    out: Tensor = call(_op, x, weight, bias)
    return out


@register_fake("linear_rows")
def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))

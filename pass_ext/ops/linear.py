"""``linear_rows``: a linear layer for the few rows of a decoding step.

out[r] = weight @ x[r] + bias. Kernels: csrc/cpu/linear.cpp, csrc/cuda/linear.cuh.
"""

from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.common.arguments import typed
from pass_ext.ops.common.kernels import call, fake_kernel, refuse_gradients

_op = ops.linear_rows.default


@typed("pass_ext::", page="ops/layer")
def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` for the few rows of a decoding step, ``[..., in]`` to ``[..., out]``: reads the weight
    once for all rows, on a GPU once for every 16 (in float32 8).

    Args:
        x: ``[..., in]`` bfloat16, float16 or float32.
        weight: ``[out, in]`` in x's dtype; rows may be strided, ``in`` contiguous.
        bias: ``[out]`` in x's dtype.

    Returns:
        ``[..., out]`` in x's dtype; products and sums are fp32, rounded once.

    A row's result has the same bits whatever the other rows are, how many there are, and how many threads compute them (on one
    instruction set, or one kind of GPU). So a token decoded in a batch of drafts gets the numbers of a token decoded alone.

    ``torch.nn.functional.linear`` may be faster for more than 64 rows on a GPU, for large weights there in any case, and for
    more than 128 rows where the processor multiplies the dtype itself. No gradients, reverse or forward: the op raises if an
    input requires one.

    Example:

        >>> x, weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2)
        >>> pass_ext.layers.linear_rows(x, weight, torch.tensor([0.5, 0.0]))
        tensor([[1.5000, 2.0000],
                [3.5000, 4.0000]])
    """
    refuse_gradients("linear_rows", x, weight, bias)
    out: Tensor = call(_op, x, weight, bias)
    return out


@fake_kernel("linear_rows")
def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))

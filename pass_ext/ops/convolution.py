"""``convolution_tree``: short causal convolutions over the trees of a step, as in front of recurrent layers and in LFM.

The window of a node runs along its path and into the request's state: csrc/core/convolution.h. Kernels:
csrc/cpu/convolution.cpp, csrc/cuda/convolution.cu.
"""

from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.common.arguments import index_of, integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel, refuse_gradients
from pass_ext.ops.recurrent import check_step

_op = ops.convolution_tree.default


@typed("pass_ext::", page="ops/recurrent")
def convolution_tree(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    *,
    activation: str | None = None,
    state_index: Tensor | None = None,
) -> Tensor:
    """A causal convolution per channel at every node of a step: over the node's input, those of its K - 1 nearest ancestors
    and, beyond the root, the newest inputs in its request's state, which is not changed.

    Args:
        x: ``[N, C]`` bfloat16, float16 or float32; rows may be strided, C contiguous.
        weight: ``[C, K]`` in x's dtype, K from 2 to 8; the last column multiplies the newest input.
        bias: ``[C]`` in x's dtype, or None.
        states: ``[B, C, K - 1]`` in x's dtype, the last inputs of each request, newest last; any strides. Beside
            ``state_index`` ``[slots, C, K - 1]``.
        parents, cu_nodes, state_index: as for ``recurrent_tree``.
        activation: "silu" or None.

    Returns:
        ``[N, C]`` in x's dtype. ``state_commit_`` takes x itself as the update.

    Computes in float32 and rounds once. A node has the bits that steps of one token along its path give. No gradients, reverse
    or forward: the op raises if an input requires one. Values that are out of range: as in ``recurrent_tree``.

    Example:

        >>> x, weight, state = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0, 1.0]]), torch.zeros(1, 1, 1)
        >>> parents, cu_nodes = torch.tensor([-1, 0, 0]), torch.tensor([0, 3])  # a root and its two children
        >>> pass_ext.layers.convolution_tree(x, weight, None, state, parents, cu_nodes).flatten()  # 1, 10 * 1 + 2, 10 * 1 + 3
        tensor([ 1., 12., 13.])
    """
    refuse_gradients("convolution_tree", x, weight, bias, states)
    if activation is not None:
        index_of("convolution_tree", "activation", activation, ("silu",))
    parents = integers("convolution_tree", "parents", parents)
    cu_nodes = integers("convolution_tree", "cu_nodes", cu_nodes)
    state_index = integers("convolution_tree", "state_index", state_index)
    check_step("convolution_tree", cu_nodes, x.shape[0], state_index, [states], parents)
    out: Tensor = call(_op, x, weight, bias, states, state_index, parents, cu_nodes, activation is not None)
    return out


@fake_kernel("convolution_tree")
def _shape(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    state_index: Tensor | None,
    parents: Tensor,
    cu_nodes: Tensor,
    silu: bool,
) -> Tensor:
    return x.new_empty(x.shape)

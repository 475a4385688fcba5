"""``state_commit_``: brings the states of all layers to the end of the accepted path, in place, in one call.

Recurrent states replay k, u and the decay of the accepted nodes, convolutions shift their inputs: csrc/core/state.h. Kernels:
csrc/cpu/state.cpp, csrc/cuda/state.cu.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pass_ext._library import debug_enabled, ops
from pass_ext.ops.common.arguments import integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel
from pass_ext.ops.recurrent import RecurrentUpdate, check_step

_op = ops.state_commit_.default


@typed("pass_ext::", page="ops/recurrent")
def state_commit_(
    states: Sequence[Tensor],
    updates: Sequence[RecurrentUpdate | Tensor],
    cu_nodes: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    *,
    state_index: Tensor | None = None,
) -> None:
    """Moves the states of all layers, in place, after the nodes ``path[b, 0]`` … ``path[b, num_accepted[b]]`` of each request.

    The states have the bits that steps of one token would have left. Each is read once and written once; the work grows with
    the accepted nodes, never with the tree.

    Args:
        states: of each layer a recurrent state ``[B, H, dk, dv]`` float32 or a convolution's ``[B, C, K - 1]``, as
            ``recurrent_tree`` and ``convolution_tree`` read them, in any order; any strides. The same memory twice is refused.
        updates: for each state the update that ``recurrent_tree`` returned, or the x that ``convolution_tree`` took.
        cu_nodes: ``[B + 1]`` int32, of the step. Equal bounds: a padded request, whose states are not written.
        path: ``[B, A]`` int32, as ``accept_tree`` returns it: node 0, then the accepted nodes, then -1; A is at most 1,024.
            -1 entries are skipped.
        num_accepted: ``[B]`` int32.
        state_index: ``[B]`` int32, the row of every state of each request. Requests must not share a row.

    The CPU refuses nodes, counts and slots that are out of range, before anything is written. On CUDA values are not checked,
    to avoid a synchronisation: nodes and states that do not exist are left out; ``pass_ext.set_debug(True)`` checks them there
    too. Integer arguments may have any integer dtype; numbers outside int32 are out of range. No gradients, reverse or forward:
    the op raises if a tensor requires one.

    Example:

        >>> window, x = torch.zeros(1, 1, 2), torch.tensor([[1.0], [2.0], [3.0]])  # the inputs of a root and its two children
        >>> path, accepted = torch.tensor([[0, 2]]), torch.tensor([1])
        >>> pass_ext.layers.state_commit_([window], [x], torch.tensor([0, 3]), path, accepted)
        >>> window
        tensor([[[1., 3.]]])
    """
    states = list(states)
    tensors: list[Tensor] = []
    parts = []
    for update in updates:
        own = [update] if isinstance(update, Tensor) else [part for part in update if part is not None]
        tensors += own
        parts.append(len(own))
    if torch.is_grad_enabled() and True in [tensor.requires_grad for tensor in (*states, *tensors)]:
        raise RuntimeError(
            "pass_ext::state_commit_: it overwrites states and no gradient is implemented, but a tensor of states or updates "
            "requires one; call it under torch.no_grad()"
        )
    cu_nodes = integers("state_commit_", "cu_nodes", cu_nodes)
    path = integers("state_commit_", "path", path)
    num_accepted = integers("state_commit_", "num_accepted", num_accepted)
    state_index = integers("state_commit_", "state_index", state_index)
    if tensors and not torch.compiler.is_compiling() and debug_enabled():
        check_step("state_commit_", cu_nodes, tensors[0].shape[0], state_index, states)
        _check_path(cu_nodes, path, num_accepted)
    call(_op, states, tensors, parts, cu_nodes, path, num_accepted, state_index)
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    # Without this a backward that has saved a state would use its new content without an error.
    torch.autograd.graph.increment_version(states)


def _check_path(cu_nodes: Tensor, path: Tensor, num_accepted: Tensor) -> None:
    """Raises IndexError for counts and nodes that the CPU op refuses. Synchronises with the device."""
    width = path.shape[1]
    for b, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        accepted = int(num_accepted[b])
        if first < last and not 0 <= accepted < width:
            raise IndexError(
                f"pass_ext::state_commit_: num_accepted must be in [0, {width}) (path has {width} columns), got {accepted} "
                f"at {b}"
            )
        for j, node in enumerate(path[b, : accepted + 1].tolist() if first < last else ()):
            if not -1 <= node < last - first:
                raise IndexError(
                    f"pass_ext::state_commit_: path must be in [-1, {last - first}) (the nodes of request {b}), got {node} at "
                    f"[{b}, {j}]"
                )


@fake_kernel("state_commit_")
def _nothing(
    states: list[Tensor],
    updates: list[Tensor],
    parts: list[int],
    cu_nodes: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    state_index: Tensor | None,
) -> None:
    return None

"""``tree_prepare``: the nodes that each node of a step sees, as bits, and its depth.
``tree_mask``: these bits as a dense additive mask, the form that most decoders take.

The formulas: csrc/core/tree.h. Kernels: csrc/cpu/tree.cpp, csrc/cuda/tree.cuh.
"""

from itertools import pairwise

import torch
from torch import Tensor

from pass_ext import _library
from pass_ext.ops.common.arguments import integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel

_prepare_op = _library.ops.tree_prepare.default
_mask_op = _library.ops.tree_mask.default


@typed("pass_ext::", page="ops/attention")
def tree_prepare(parents: Tensor, cu_nodes: Tensor, max_nodes: int) -> tuple[Tensor, Tensor]:
    """Computes for each node of B packed trees the nodes that it sees, itself and its ancestors, as bits
    ``[N, ceil(max_nodes / 64)]``, and its depth ``[N]``.

    Args:
        parents: ``[N]`` int32, contiguous: each node's parent as an index in its request, -1 for a root. Parents come before
            children. A request may have several roots.
        cu_nodes: ``[B + 1]`` int32; request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]``. Equal bounds: a padded request.
            Rows after the last bound belong to no request.
        max_nodes: no request has more nodes than this; at most 1,024.

    Returns:
        ``(visible [N, ceil(max_nodes / 64)] int64, depths [N] int32)``: bit j of row i is set where node j of i's request is i
        itself or one of its ancestors; depths counts the edges from the root. Rows that belong to no request get 0
        and 0.

    The CPU refuses a parent outside ``[-1, i)``, invalid bounds, and requests larger than max_nodes. On CUDA values are not
    checked, to avoid a synchronisation: a node with such a parent becomes a root; nodes from max_nodes on get no bits and
    depth 0; with bounds that do not rise from 0 to at most N, so do all rows. ``pass_ext.set_debug(True)`` checks all three
    there too. Parents and bounds may have any integer dtype; numbers outside int32 are out of range.

    Example:

        >>> parents, cu_nodes = torch.tensor([-1, 0, 0, 1]), torch.tensor([0, 4])  # two children, the first with one of its own
        >>> visible, depths = pass_ext.tree_prepare(parents, cu_nodes, 4)
        >>> [f"{bits:04b}" for bits in visible[:, 0].tolist()], depths.tolist()
        (['0001', '0011', '0101', '1011'], [0, 1, 1, 2])
    """
    parents = integers("tree_prepare", "parents", parents)
    cu_nodes = integers("tree_prepare", "cu_nodes", cu_nodes)
    if _library.debug_enabled() and not torch.compiler.is_compiling():
        check_bounds("tree_prepare", cu_nodes, parents.shape[0], max_nodes)
        check_parents("tree_prepare", parents, cu_nodes)
    visible, depths = call(_prepare_op, parents, cu_nodes, max_nodes)
    return visible, depths


@typed("pass_ext::", page="ops/attention")
def tree_mask(
    visible: Tensor, cu_nodes: Tensor, max_nodes: int, prefix_lens: Tensor, kv_len: int, dtype: torch.dtype
) -> Tensor:
    """The additive attention mask ``[B, 1, max_nodes, kv_len]`` of a step, for decoders that take a dense mask; node j of
    request b is column ``prefix_lens[b] + j``.

    Args:
        visible: ``[N, ceil(max_nodes / 64)]`` int64: bit j of row i set = node i sees node j of its request. Any bits are
            legal.
        cu_nodes: ``[B + 1]`` int32; request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]``. Equal bounds: a padded request.
        max_nodes: no request has more nodes than this; at most 1,024.
        prefix_lens: ``[B]`` int32, committed tokens of each request.
        kv_len: columns of the mask; at least the prefix and nodes of every request.
        dtype: the mask's dtype: bfloat16, float16 or float32.

    Returns:
        ``[B, 1, max_nodes, kv_len]``: 0 where row i sees the column, that is columns ``[0, prefix_len)`` and those of the nodes
        in its bits; else ``torch.finfo(dtype).min``. Rows beyond a request's nodes see nothing; the number is finite, so that
        softmax gives no NaN there.

    The CPU refuses lengths and bounds that are out of range. On CUDA values are not checked, to avoid a synchronisation:
    they are clamped; ``pass_ext.set_debug(True)`` checks them there too. Both may have any integer dtype; numbers outside
    int32 are out of range.

    Example:

        >>> visible = torch.tensor([[0b1], [0b11]])
        >>> prefix = torch.tensor([1])  # one key in front of two nodes
        >>> pass_ext.tree_mask(visible, torch.tensor([0, 2]), 2, prefix, 3, torch.float32) == 0
        tensor([[[[ True,  True, False],
                  [ True,  True,  True]]]])
    """
    cu_nodes = integers("tree_mask", "cu_nodes", cu_nodes)
    prefix_lens = integers("tree_mask", "prefix_lens", prefix_lens)
    if _library.debug_enabled() and not torch.compiler.is_compiling():
        check_bounds("tree_mask", cu_nodes, visible.shape[0], max_nodes)
        check_columns(cu_nodes, prefix_lens, kv_len)
    mask: Tensor = call(_mask_op, visible, cu_nodes, max_nodes, prefix_lens, kv_len, dtype)
    return mask


def check_bounds(op: str, cu_nodes: Tensor, rows: int, max_nodes: int) -> None:
    """Raises IndexError for bounds that do not rise to at most ``rows``, or that give a request more than ``max_nodes``.
    Synchronises with the device."""
    for b, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        if not 0 <= first <= last <= rows or last - first > max_nodes:
            raise IndexError(f"pass_ext::{op}: cu_nodes must rise to at most {rows} in steps of at most {max_nodes}, got "
                             f"{first} and {last} at {b}")  # fmt: skip


def check_parents(op: str, parents: Tensor, cu_nodes: Tensor) -> None:
    """Raises IndexError for the first parent that is neither -1 nor an earlier node of its request. Synchronises with the
    device."""
    all_parents = parents.tolist()
    for b, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        for node, parent in enumerate(all_parents[first:last]):
            if not -1 <= parent < node:
                raise IndexError(f"pass_ext::{op}: parents must be -1 or an earlier node of the same request, got "
                                 f"{parent} at flat index {first + node}, node {node} of request {b}")  # fmt: skip


def check_columns(cu_nodes: Tensor, prefix_lens: Tensor, kv_len: int) -> None:
    """Raises IndexError for a request whose prefix and nodes need more than ``kv_len`` columns. Synchronises with the
    device."""
    for b, ((first, last), prefix) in enumerate(zip(pairwise(cu_nodes.tolist()), prefix_lens.tolist(), strict=True)):
        if last > first and (prefix < 0 or prefix + last - first > kv_len):
            raise IndexError(f"pass_ext::tree_mask: prefix_lens must be in [0, kv_len - nodes], got {prefix} at {b}, with "
                             f"kv_len {kv_len} and {last - first} nodes")  # fmt: skip


@fake_kernel("tree_prepare")
def _prepare_shape(parents: Tensor, cu_nodes: Tensor, max_nodes: int) -> tuple[Tensor, Tensor]:
    return (
        parents.new_empty((parents.shape[0], (max_nodes + 63) // 64), dtype=torch.int64),
        parents.new_empty(parents.shape),
    )


@fake_kernel("tree_mask")
def _mask_shape(
    visible: Tensor, cu_nodes: Tensor, max_nodes: int, prefix_lens: Tensor, kv_len: int, dtype: torch.dtype
) -> Tensor:
    return visible.new_empty((cu_nodes.shape[0] - 1, 1, max_nodes, kv_len), dtype=dtype)

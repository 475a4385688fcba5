"""``cache_commit_``: moves the accepted rows of a step after the prefix, in the caches of all layers at once.

Slot prefix_len + j gets the row of node path[j], from `new` or from the slot that the step wrote: csrc/core/cache.h.
Kernels: csrc/cpu/cache.cpp, csrc/cuda/cache.cuh.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pass_ext import _library
from pass_ext.ops.common.arguments import integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel, nothing

_op = _library.ops.cache_commit_.default


@typed("pass_ext::", page="ops/attention")
def cache_commit_(
    caches: Sequence[Tensor] | Tensor,
    prefix_lens: Tensor,
    cu_nodes: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    *,
    new: Sequence[Tensor] | Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """Moves the K/V rows of accepted nodes to the cache slots after the prefix, in place, in all layers at once.

    For request b and j = 0 .. ``num_accepted[b]``, the K/V row of node ``path[b, j]`` goes to slot ``prefix_lens[b] + j``. The
    work grows with the accepted rows, never with the context; a row that is already at its slot is not written.

    Args:
        caches: the K and V tensors of all layers, each ``[B, S, Hkv, D]`` with any strides, D contiguous (a
            ``[B, Hkv, S, D]`` cache comes through ``.transpose(1, 2)``), or pages ``[P, page, Hkv, D]`` beside a
            ``block_table``. Any dtype; tensors may differ in dtype, heads and D. Tensors of equal layout share one
            launch: in most models that is all of them. The same memory twice is refused: give a cache that layers share
            once. Or one tensor of all of them, with a dimension in front.
        prefix_lens: ``[B]`` int32, committed tokens of each request before this step.
        cu_nodes: ``[B + 1]`` int32; request b owns nodes ``cu_nodes[b]:cu_nodes[b + 1]``. Equal bounds: a padded request,
            whose cache is not written.
        path: ``[B, A]`` int32, as ``accept_tree`` returns it: node 0, then the accepted nodes, then -1; A is at most 1,024.
            Any order and repeated nodes are legal: the result is as if all rows were read before the first is written.
        num_accepted: ``[B]`` int32.
        new: for each cache tensor the rows of the nodes, ``[N, Hkv, D]`` in its dtype, D contiguous. None: node i's row is
            in the cache at slot ``prefix_len + i``. One tensor with a dimension in front will do too.
        block_table: ``[B, P']`` int32, the page of each ``page`` slots of a request. Entries of slots that no row is moved
            from or to are not read. Requests must not share a page that is written.

    The CPU refuses nodes, lengths and pages that are out of range, before anything is written. On CUDA values are not
    checked, to avoid a synchronisation: rows out of range are not moved; ``pass_ext.set_debug(True)`` checks them there too.
    Integer arguments may have any integer dtype; numbers outside int32 are out of range. No gradients, reverse or forward:
    the op raises if a tensor requires one.

    Example:

        >>> cache = torch.tensor([7.0, 1.0, 2.0, 3.0]).view(1, 4, 1, 1)  # one token, then a root and two candidates
        >>> path, accepted = torch.tensor([[0, 2]]), torch.tensor([1])  # as accept_tree returns them
        >>> pass_ext.cache_commit_([cache], torch.tensor([1]), torch.tensor([0, 3]), path, accepted)
        >>> cache.flatten()
        tensor([7., 1., 3., 3.])
    """
    caches = [caches] if isinstance(caches, Tensor) else list(caches)
    new = [new] if isinstance(new, Tensor) else new
    if torch.is_grad_enabled() and (_require_grad(caches) or (new is not None and _require_grad(new))):
        raise RuntimeError(
            "pass_ext::cache_commit_: it overwrites caches and no gradient is implemented, but a tensor of caches or new "
            "requires one; call it under torch.no_grad()"
        )
    if new is not None and _count(new, 3) != _count(caches, 4):
        raise RuntimeError(
            f"pass_ext::cache_commit_: new must have one tensor for each of the {_count(caches, 4)} caches, got "
            f"{_count(new, 3)}"
        )
    prefix_lens = integers("cache_commit_", "prefix_lens", prefix_lens)
    cu_nodes = integers("cache_commit_", "cu_nodes", cu_nodes)
    path = integers("cache_commit_", "path", path)
    num_accepted = integers("cache_commit_", "num_accepted", num_accepted)
    block_table = integers("cache_commit_", "block_table", block_table)
    if _library.debug_enabled() and not torch.compiler.is_compiling():
        check_fits(caches, prefix_lens, cu_nodes, path, num_accepted, new, block_table)
    call(_op, caches, prefix_lens, cu_nodes, path, num_accepted, [] if new is None else list(new), block_table)
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    # Without this a backward that has saved a cache would use its new content without an error.
    torch.autograd.graph.increment_version(caches)


def _count(tensors: Sequence[Tensor], dims: int) -> int:
    """How many tensors of so many dimensions these are: a list, or one tensor with a dimension in front."""
    return len(tensors[0]) if len(tensors) == 1 and tensors[0].dim() == dims + 1 else len(tensors)


def _require_grad(tensors: Sequence[Tensor]) -> bool:
    return True in [tensor.requires_grad for tensor in tensors]


def check_fits(
    caches: Sequence[Tensor],
    prefix_lens: Tensor,
    cu_nodes: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    new: Sequence[Tensor] | None,
    block_table: Tensor | None,
) -> None:
    """Raises IndexError for bounds, nodes, lengths or pages that the CPU op refuses. Synchronises with the device."""
    bounds, prefixes, accepted, width = cu_nodes.tolist(), prefix_lens.tolist(), num_accepted.tolist(), path.shape[1]
    most = new[0].shape[-3] if new else 2**31 - 1
    for b, (first, last) in enumerate(pairwise(bounds)):
        if not 0 <= first <= last <= most:
            raise IndexError(
                f"pass_ext::cache_commit_: cu_nodes must rise to at most {most}, got {first} and {last} at {b}"
            )
        if first == last:
            continue
        if prefixes[b] < 0:
            raise IndexError(f"pass_ext::cache_commit_: prefix_lens must not be negative, got {prefixes[b]} at {b}")
        if not 0 <= accepted[b] < width:
            raise IndexError(f"pass_ext::cache_commit_: num_accepted must be in [0, {width}), got {accepted[b]} at {b}")
        nodes = path[b, : accepted[b] + 1].tolist()
        if min(nodes) < -1 or max(nodes) >= last - first:
            raise IndexError(f"pass_ext::cache_commit_: path must be in [-1, {last - first}) (the nodes of request {b}), got "
                             f"{nodes}")  # fmt: skip
        slots = [prefixes[b] + j for j, node in enumerate(nodes) if node >= 0]
        if new is None:
            slots += [prefixes[b] + node for node in nodes if node >= 0]
        for outers, size in {(cache.shape[-4], cache.shape[-3]) for cache in caches} if slots else ():
            room = size * (1 if block_table is None else block_table.shape[1])
            if max(slots) >= room:
                raise IndexError(f"pass_ext::cache_commit_: caches must have slot {max(slots)} for request {b} (prefix_lens "
                                 f"{prefixes[b]}), got {room} slots")  # fmt: skip
            if block_table is not None:
                pages = block_table[b, sorted({slot // size for slot in slots})].tolist()
                if min(pages) < 0 or max(pages) >= outers:
                    raise IndexError(f"pass_ext::cache_commit_: block_table must name pages below {outers}, got {pages} "
                                     f"at {b}")  # fmt: skip


fake_kernel("cache_commit_")(nothing)

"""``attention_tree``: a step's nodes attend to one long prefix and to the nodes that their bits let them see.
``attention_merge``: two attention results over disjoint keys, made one.

The formulas: csrc/core/attention.h. Kernels: csrc/cpu/attention.cpp, csrc/cuda/attention.cuh.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pass_ext import _library
from pass_ext.ops.common.fakes import register_fake
from pass_ext.ops.common.integers import integers
from pass_ext.ops.common.nondifferentiable import call
from pass_ext.ops.tree import check_bounds

HEAD_DIMS = (64, 80, 96, 128, 256)  # kHeadDims of csrc/core/attention.h

_op = torch.ops.pass_ext.attention_tree.default
_merge_op = torch.ops.pass_ext.attention_merge.default


def attention_tree(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    cu_nodes: Tensor,
    visible: Tensor,
    max_nodes: int,
    *,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    depths: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = -1,
) -> tuple[Tensor, Tensor]:
    """Attention of N packed nodes of B requests; row i sees its request's whole prefix and the nodes in ``visible[i]``.

    Args:
        q: ``[N, Hq, D]`` bfloat16, float16 or float32; D is 64, 80, 96, 128 or 256, and Hq at most 2^20.
        k_cache, v_cache: ``[B, S, Hkv, D]`` with any strides, D contiguous (a ``[B, Hkv, S, D]`` cache comes through
            ``.transpose(1, 2)``), or pages ``[P, page, Hkv, D]`` beside a ``block_table``. Hq is any multiple of Hkv.
        prefix_lens: ``[B]`` int32, committed tokens of each request: its slots ``[0, prefix_len)``.
        cu_nodes: ``[B + 1]`` int32; request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]``. Equal bounds: a padded request. Rows
            behind the last bound belong to nobody.
        visible: ``[N, ceil(max_nodes / 64)]`` int64: bit j of row i set = node i sees node j of its request. Any bits;
            those of nodes that the request does not have count for nothing. Rows may be strided (a slice's are).
        max_nodes: no request has more nodes than this; at most 1,024.
        k_new, v_new: ``[N, Hkv, D]``, the nodes' own keys and values, where they are not in the cache. Without them node j
            is at slot ``prefix_len + j``.
        block_table: ``[B, P']`` int32, the page of each ``page`` slots of a request; any numbers where nobody looks: behind the
            last slot needed, and before the window.
        depths: ``[N]`` int32, edges from the root (``tree_prepare`` gives them); needed with a window only.
        scale: of the logits; None is ``D ** -0.5``.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 is none.
        window: a node sees keys at most this far back in the text, itself included: those with
            ``position - window < key position``, a node's position being ``prefix_len + depth``. -1 is all.

    Returns:
        ``(out [N, Hq, D] in q's dtype, lse [N, Hq] float32)``; lse is the natural log of the sum of exponentials. A row that
        sees nothing, and a row that belongs to nobody: out 0, lse -inf.

    What no row sees is never read into a result: unused slots, page padding and hidden nodes may hold NaN. Sums run in a
    fixed order: the same call gives the same bits.

    The CPU refuses lengths, bounds, depths and pages that do not fit. On CUDA nobody waits for the GPU to look: numbers are
    cut to what there is, and a page that the pool does not have reads as zeros; ``pass_ext.set_debug(True)`` checks them
    there too. Lengths, bounds, pages and depths may be of any integer dtype; numbers that int32 does not hold are such that do
    not fit. No gradients, reverse or forward: it raises where one is wanted.
    """
    floats = (q, k_cache, v_cache, k_new, v_new)
    if torch.is_grad_enabled() and any(given is not None and given.requires_grad for given in floats):
        raise RuntimeError(
            "pass_ext::attention_tree: no gradient is implemented, but an input requires one; call it under torch.no_grad()"
        )
    prefix_lens = integers("attention_tree", "prefix_lens", prefix_lens)
    cu_nodes = integers("attention_tree", "cu_nodes", cu_nodes)
    block_table = integers("attention_tree", "block_table", block_table)
    depths = integers("attention_tree", "depths", depths)
    if _library.debug_enabled() and q.is_cuda and not torch.compiler.is_compiling():
        check_fits(
            k_cache,
            prefix_lens,
            cu_nodes,
            q.shape[0],
            max_nodes,
            block_table,
            depths,
            window,
            nodes_in_cache=k_new is None,
        )
    out, lse = call(
        _op, q, k_cache, v_cache, prefix_lens, cu_nodes, visible, max_nodes, k_new, v_new, block_table, depths, scale,
        softcap, window,
    )  # fmt: skip
    return out, lse


def check_fits(
    cache: Tensor,
    prefix_lens: Tensor,
    cu_nodes: Tensor,
    rows: int,
    max_nodes: int,
    block_table: Tensor | None,
    depths: Tensor | None,
    window: int,
    *,
    nodes_in_cache: bool,
) -> None:
    """Raises IndexError for bounds, lengths, pages or depths that the CPU would refuse. Waits for the device."""
    op = "attention_tree"
    check_bounds(op, cu_nodes, rows, max_nodes)
    prefixes = prefix_lens.tolist()
    slots = cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    for b, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        nodes = last - first
        if nodes == 0:
            continue
        needed = prefixes[b] + (nodes if nodes_in_cache else 0)
        if prefixes[b] < 0 or needed > slots:
            raise IndexError(f"pass_ext::{op}: request {b} needs {needed} slots (prefix_lens {prefixes[b]}, {nodes} nodes), "
                             f"the cache has {slots}")  # fmt: skip
        if block_table is not None:
            begin = 0 if window < 0 else max(prefixes[b] - window + 1, 0)
            pages = block_table[b, begin // cache.shape[1] : -(-needed // cache.shape[1])]
            if bool(((pages < 0) | (pages >= cache.shape[0])).any()):
                raise IndexError(f"pass_ext::{op}: block_table must name pages below {cache.shape[0]} for slots {begin} to "
                                 f"{needed}, got {pages.tolist()} at {b}")  # fmt: skip
        if depths is not None and window >= 0:
            own = depths[first:last].tolist()
            if min(own) < 0 or max(own) >= nodes:
                raise IndexError(
                    f"pass_ext::{op}: depths must be in [0, {nodes}) (the nodes of request {b}), got {own}"
                )


def attention_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two attention results for the same rows over disjoint keys, made one.

    Args:
        out_a, out_b: ``[..., D]`` bfloat16, float16 or float32.
        lse_a, lse_b: ``[...]`` float32, natural log of each one's sum of exponentials; -inf where it saw nothing.

    Returns:
        ``(out [..., D], lse [...])``, as one attention over all the keys would give.

    D is below 2^31. No gradients, reverse or forward: it raises where one is wanted.
    """
    if torch.is_grad_enabled() and any(given.requires_grad for given in (out_a, lse_a, out_b, lse_b)):
        raise RuntimeError(
            "pass_ext::attention_merge: no gradient is implemented, but an input requires one; call it under torch.no_grad()"
        )
    out, lse = call(_merge_op, out_a, lse_a, out_b, lse_b)
    return out, lse


@register_fake("attention_tree")
def _attention_shape(q: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@register_fake("attention_merge")
def _merge_shape(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)

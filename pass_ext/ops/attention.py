"""``attention_tree``: each node of a step attends to the prefix and to the nodes whose bits it has.
``attention_merge``: merges two attention results over disjoint keys.

The formulas: csrc/core/attention.h. Kernels: csrc/cpu/attention.cpp, csrc/cuda/attention.cuh.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pass_ext import _library
from pass_ext.ops.common.arguments import integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel, refuse_gradients
from pass_ext.ops.quantize import CODE_HEADER, MOST_OF_CODES
from pass_ext.ops.tree import check_bounds

HEAD_DIMS = (64, 80, 96, 128, 256)
"""The head sizes of keys and values alike that have a CUDA kernel with matrix fragments: kHeadDims of csrc/core/attention.h."""
TWO_WIDTHS = (192, 128)
"""Those of keys and values that have one in 16 bits: kWideKeyDim and kNarrowValueDim of csrc/cuda/attention_tile.cuh."""
WIDTH_STEP, MOST_KEY_DIM, MOST_VALUE_DIM = 16, 576, 512


def padded_widths(keys: int, values: int, device: torch.device, *, in_codes: bool) -> tuple[int, int]:
    """The widths to pad rows of keys and of values to with zeros: on a GPU those of the next kernel with matrix fragments, if
    there is one; else the next multiples of 16. in_codes: the rows will be in 8 bits."""
    if device.type == "cuda" and max(keys, values) <= HEAD_DIMS[-1]:
        width = next(dim for dim in HEAD_DIMS if dim >= max(keys, values))
        holds_rows = keys <= TWO_WIDTHS[0] < width and values <= TWO_WIDTHS[1]
        return TWO_WIDTHS if holds_rows and not in_codes else (width, width)
    if keys > MOST_KEY_DIM or values > MOST_VALUE_DIM:
        raise NotImplementedError(
            f"attention_tree has head sizes up to {MOST_KEY_DIM} of keys and {MOST_VALUE_DIM} of values, these are {keys} and "
            f"{values}"
        )
    return -(-keys // WIDTH_STEP) * WIDTH_STEP, -(-values // WIDTH_STEP) * WIDTH_STEP


_op = _library.ops.attention_tree.default
_merge_op = _library.ops.attention_merge.default


@typed("pass_ext::", page="ops/attention")
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
    sinks: Tensor | None = None,
    chunk: int = -1,
    key_lists: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of N packed nodes, ``q [N, Hq, D]``, over the KV cache of B requests: row i sees its request's prefix and the
    nodes in ``visible[i]``. Keys have D numbers, values Dv.

    Args:
        q: ``[N, Hq, D]`` bfloat16, float16 or float32; D is a multiple of 16 up to 576, and Hq at most 2^20. On CUDA the fast
            kernels are those of 64, 80, 96, 128 and 256 numbers, keys and values alike, in 16 or 8 bits, and of 192 beside 128
            in 16 bits.
        k_cache, v_cache: ``[B, S, Hkv, D]`` and ``[B, S, Hkv, Dv]`` with any strides, numbers of a row contiguous (a
            ``[B, Hkv, S, D]`` cache comes through ``.transpose(1, 2)``), or pages ``[P, page, Hkv, D]`` beside a
            ``block_table``. Hq is any multiple of Hkv, Dv a multiple of 16 up to 512. Values may be the first numbers of the
            keys, ``k_cache[..., :Dv]``. Keys and values may be in 8 bits, ``[..., 16 + D]`` as ``quantize_rows`` makes them,
            k_new and v_new then too; values are ``k_cache[..., :16 + Dv]`` if they are the keys' first numbers.
        prefix_lens: ``[B]`` int32, committed tokens of each request: its slots ``[0, prefix_len)``.
        cu_nodes: ``[B + 1]`` int32; request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]``. Equal bounds: a padded request. Rows
            after the last bound belong to no request.
        visible: ``[N, ceil(max_nodes / 64)]`` int64: bit j of row i set = node i sees node j of its request. Any bits are
            legal; bits of nodes that the request does not have are ignored. Rows may be strided, as in ``Tree.slice``.
        max_nodes: no request has more nodes than this; at most 1,024.
        k_new, v_new: ``[N, Hkv, D]`` and ``[N, Hkv, Dv]``, keys and values of the nodes, if they are not in the cache. None:
            node j is in the cache at slot ``prefix_len + j``.
        block_table: ``[B, P']`` int32, the page of each ``page`` slots of a request. Entries after the last slot needed and
            before window and chunk are not read.
        depths: ``[N]`` int32, edges from the root, from ``tree_prepare``; needed with a window or chunks only.
        scale: factor of the logits; None is ``D ** -0.5``.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 is off.
        window: a node at position ``prefix_len + depth`` sees only keys with ``position - window < key position``, itself
            included. -1 is off.
        sinks: ``[Hq]`` of any float dtype, a logit of each head that takes weight like a key and has no value: out becomes
            ``out * e^lse / (e^lse + e^sink)``, lse stays as it is. -inf is none.
        chunk: a node at position ``prefix_len + depth`` sees only keys of its own chunk: positions from
            ``position // chunk * chunk`` on. -1 is off. With a window too, both must hold.
        key_lists: ``[N, L]`` int32: row i sees, of the keys that all of the above leave to it, only those in ``key_lists[i]``,
            and no other is read. Key p is position p of the prefix, key ``prefix_len + j`` is node j; ascending, then -1. Rows
            may be strided. None: all keys.
        batch_invariant: a row's numbers have the bits that the row has alone, with its path in the cache. On the CPU they
            always have, in trees of up to 64 nodes. On CUDA they always have in float32, with key_lists and at the widths
            without a fast kernel; for the others this takes a kernel that adds in one order and is slower.

    Returns:
        ``(out [N, Hq, Dv] in q's dtype, lse [N, Hq] float32)``; lse is the natural log of the sum of exponentials, without a
        sink's. A row that sees nothing or belongs to no request: out 0, lse -inf.

    Keys that no row sees never reach a result: unused slots, page padding and hidden nodes may hold NaN. Sums have a fixed
    order: the same call gives the same bits.

    The CPU refuses lengths, bounds, depths, pages and listed keys that are out of range. On CUDA values are not checked, to
    avoid a synchronisation: they are clamped, a page outside the pool reads as zeros, and an entry of a list that names no
    key, or none above the entry before it, is left out; ``pass_ext.set_debug(True)`` checks them there too. Lengths, bounds,
    pages, depths and lists may have any integer dtype; numbers outside int32 are out of range. No
    gradients, reverse or forward: the op raises if an input requires one.

    Example:

        >>> q, k = torch.ones(2, 1, 64), torch.ones(1, 4, 1, 64)
        >>> v = k * torch.arange(4.0)[:, None, None]
        >>> trees = pass_ext.pack_trees([pass_ext.Tree.chain(1)])
        >>> step = torch.tensor([2]), trees.cu_nodes, trees.visible, 2  # keys 0 and 1 are the prefix, 2 and 3 the nodes'
        >>> out, lse = pass_ext.attention_tree(q, k, v, *step)
        >>> out[:, 0, 0]  # the mean of what each node sees
        tensor([1.0000, 1.5000])
    """
    refuse_gradients("attention_tree", q, k_cache, v_cache, k_new, v_new, sinks)
    prefix_lens = integers("attention_tree", "prefix_lens", prefix_lens)
    cu_nodes = integers("attention_tree", "cu_nodes", cu_nodes)
    block_table = integers("attention_tree", "block_table", block_table)
    depths = integers("attention_tree", "depths", depths)
    key_lists = integers("attention_tree", "key_lists", key_lists)
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
            chunk,
            key_lists,
            nodes_in_cache=k_new is None,
        )
    out, lse = call(
        _op, q, k_cache, v_cache, prefix_lens, cu_nodes, visible, max_nodes, k_new, v_new, block_table, depths, scale,
        softcap, window, _in_float32(sinks), chunk, key_lists, batch_invariant,
    )  # fmt: skip
    return out, lse


def _in_float32(sinks: Tensor | None) -> Tensor | None:
    """Other dtypes than floats are returned unchanged: the op refuses them."""
    return sinks.float() if sinks is not None and sinks.is_floating_point() else sinks


def check_fits(
    cache: Tensor,
    prefix_lens: Tensor,
    cu_nodes: Tensor,
    rows: int,
    max_nodes: int,
    block_table: Tensor | None,
    depths: Tensor | None,
    window: int,
    chunk: int,
    key_lists: Tensor | None,
    *,
    nodes_in_cache: bool,
) -> None:
    """Raises IndexError for bounds, lengths, pages, depths or lists that the CPU op refuses. Synchronises with the device."""
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
            begin = begin if chunk < 0 else max(begin, prefixes[b] // chunk * chunk)
            pages = block_table[b, begin // cache.shape[1] : -(-needed // cache.shape[1])]
            if bool(((pages < 0) | (pages >= cache.shape[0])).any()):
                raise IndexError(f"pass_ext::{op}: block_table must name pages below {cache.shape[0]} for slots {begin} to "
                                 f"{needed}, got {pages.tolist()} at {b}")  # fmt: skip
        if depths is not None and max(window, chunk) >= 0:
            request_depths = depths[first:last].tolist()
            if min(request_depths) < 0 or max(request_depths) >= nodes:
                raise IndexError(
                    f"pass_ext::{op}: depths must be in [0, {nodes}) (the nodes of request {b}), got {request_depths}"
                )
        if key_lists is not None:
            lists, keys = key_lists[first:last].long(), prefixes[b] + nodes
            before = torch.nn.functional.pad(lists[:, :-1], (1, 0), value=-2)
            follows = (lists > before) & (before != -1) & (lists >= 0) & (lists < keys)
            if not bool((follows | (lists == -1)).all()):
                row = first + int((~(follows | (lists == -1))).any(1).nonzero()[0])
                raise IndexError(
                    f"pass_ext::{op}: key_lists must name keys in [0, {keys}) (prefix and nodes of request {b}) in ascending "
                    f"order and then be -1, got {key_lists[row].tolist()} at row {row}"
                )


@typed("pass_ext::", page="ops/attention")
def attention_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges two attention results of the same rows over disjoint keys: ``out [..., D]`` and ``lse [...]`` of each.

    Args:
        out_a, out_b: ``[..., D]`` bfloat16, float16 or float32.
        lse_a, lse_b: ``[...]`` float32, natural log of the sum of exponentials; -inf for a row that saw nothing.
        sinks: as ``attention_tree`` takes them, one for each place of lse's last dimension. A row has one sink however many
            parts it has: give it to the last merge, and to nothing before it.

    Returns:
        ``(out [..., D], lse [...])``, the result of one attention over all the keys; lse is without the sinks.

    D is below 2^31. No gradients, reverse or forward: the op raises if an input requires one.

    Example:

        >>> one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> out, lse = pass_ext.attention_merge(one, torch.zeros(1), other, torch.zeros(1))
        >>> out, lse
        (tensor([[0.5000, 0.5000]]), tensor([0.6931]))
    """
    refuse_gradients("attention_merge", out_a, lse_a, out_b, lse_b, sinks)
    out, lse = call(_merge_op, out_a, lse_a, out_b, lse_b, _in_float32(sinks))
    return out, lse


@fake_kernel("attention_tree")
def _attention_shape(q: Tensor, _keys: Tensor, values: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    dim = values.shape[3] - (CODE_HEADER if values.dtype in MOST_OF_CODES else 0)
    return q.new_empty(*q.shape[:2], dim), q.new_empty(q.shape[:2], dtype=torch.float32)


@fake_kernel("attention_merge")
def _merge_shape(out_a: Tensor, lse_a: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)

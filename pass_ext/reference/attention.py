"""``attention_tree`` and ``attention_merge`` in plain PyTorch, in fp64 and one row at a time.

A boolean mask says which keys each row sees. Only these are gathered, so that no other key can change the result.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_HEADER = 16
_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class AttentionTerms(NamedTuple):
    """A result, and two terms that bound the error of a kernel with less precision. s is a logit, p = e^(s - lse)."""

    out: Tensor
    """``[N, Hq, Dv]``: sum of p v over the keys that a row sees. A sink is in the sum of p, but has no v."""
    lse: Tensor
    """``[N, Hq]``: ln of the sum of e^s over them, without a sink."""
    magnitude: Tensor
    """``[N, Hq, Dv]``: sum of p abs(v)."""
    reach: Tensor
    """``[N, Hq]``: the largest sum of abs(q_d k_d) over d."""


def attention_mask(
    prefix: int, visible: Tensor, depths: Tensor | None = None, window: int = -1, chunk: int = -1
) -> Tensor:
    """The keys that the nodes of one request see: bool ``[nodes, prefix + nodes]``. Bits of missing nodes are ignored."""
    nodes = torch.arange(visible.shape[0], device=visible.device)
    tree = (visible[:, nodes // 64] >> (nodes % 64)) & 1 == 1
    mask = torch.cat([tree.new_ones(len(nodes), prefix), tree], dim=1)
    if max(window, chunk) >= 0:
        assert depths is not None, "windows and chunks need depths"
        positions = torch.cat([torch.arange(prefix, device=visible.device), prefix + depths])
        own = positions[prefix:, None]
        if window >= 0:
            mask &= own - window < positions
        if chunk >= 0:
            mask &= own // chunk * chunk <= positions
    return mask


def attention_tree(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """``(out [N, Hq, Dv], lse [N, Hq])``, both fp64; the arguments are those of ``attention_terms``."""
    terms = attention_terms(*arguments, **options)
    return terms.out, terms.lse


def attention_terms(
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
    precision: torch.dtype = torch.float64,
) -> AttentionTerms:
    """``attention_tree`` with the terms that bound its error. In fp32 the result is that of the formula in plain PyTorch."""
    rows, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    sinks = q.new_full((heads,), -torch.inf) if sinks is None else sinks
    is_quantized = v_cache.dtype not in _FLOATS
    zeros = q.new_zeros(rows, heads, v_cache.shape[3] - (_HEADER if is_quantized else 0), dtype=precision)
    terms = AttentionTerms(zeros, zeros[..., 0] - torch.inf, zeros.clone(), zeros[..., 0].clone())
    for b, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
        prefix = int(prefix_lens[b])
        nodes = slice(first, last)
        mask = attention_mask(prefix, visible[nodes], None if depths is None else depths[nodes], window, chunk)
        for i, named in enumerate(() if key_lists is None else key_lists[nodes].tolist()):
            listed = torch.zeros_like(mask[i])
            listed[[key for key in named if key >= 0]] = True
            mask[i] &= listed
        table = None if block_table is None else block_table[b]
        seen = mask.any(dim=0).nonzero().flatten()
        keys = _numbers(_rows_of(k_cache, k_new, b, table, prefix, first, seen), precision)
        values = _numbers(_rows_of(v_cache, v_new, b, table, prefix, first, seen), precision)
        for i in range(first, last):
            sees = mask[i - first, seen]
            if sees.any():
                _attend(terms, i, q[i].to(precision), keys[sees], values[sees], scale, softcap, sinks.to(precision))
    return terms


def _rows_of(
    cache: Tensor, new: Tensor | None, request: int, table: Tensor | None, prefix: int, first: int, keys: Tensor
) -> Tensor:
    """Rows ``[len(keys), Hkv, D]`` of one request's K or V. ``keys`` are positions in its text, ascending."""
    in_cache = keys if new is None else keys[keys < prefix]
    if table is None:
        rows = cache[request, in_cache]
    else:
        page = cache.shape[1]
        rows = cache[table[in_cache // page].long(), in_cache % page]
    return rows if new is None else torch.cat([rows, new[first + keys[keys >= prefix] - prefix]])


def quantized(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``[..., D]`` in dtype: as they are in a float dtype; else ``[..., 16 + D]`` in 8 bits, a header of 16 bytes that
    begins with the row's scale in float32, and codes."""
    if dtype in _FLOATS:
        return rows
    scale = (rows.float().abs().amax(-1, keepdim=True) / _MOST[dtype]).contiguous()
    codes = (rows.float() / scale).nan_to_num(0.0).clamp(-_MOST[dtype], _MOST[dtype])
    codes = (codes.round() if dtype is torch.int8 else codes).to(dtype)
    zeros = codes.new_zeros((*rows.shape[:-1], _HEADER - 4), dtype=torch.uint8)
    return torch.cat((scale.view(torch.uint8), zeros, codes.view(torch.uint8)), -1).view(dtype)


def _numbers(rows: Tensor, precision: torch.dtype) -> Tensor:
    """The numbers of rows, which may be codes after a header of 16 bytes that begins with their scale."""
    if rows.dtype in _FLOATS:
        return rows.to(precision)
    scale = rows[..., :4].contiguous().view(torch.float32)
    return rows[..., _HEADER:].to(torch.float32).to(precision) * scale.to(precision)


def _attend(
    terms: AttentionTerms,
    row: int,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor,
) -> None:
    """Writes the terms of one row that sees all of ``keys``: q ``[Hq, D]``, keys and values ``[n, Hkv, D]``, sinks
    ``[Hq]``."""
    grouped = q.unflatten(0, (keys.shape[1], -1))
    scores = torch.einsum("hgd,nhd->hgn", grouped, keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - torch.logaddexp(lse, sinks.view_as(lse))[..., None])
    terms.out[row] = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)
    terms.lse[row] = lse.flatten()
    terms.magnitude[row] = torch.einsum("hgn,nhd->hgd", weights, values.abs()).flatten(0, 1)
    terms.reach[row] = torch.einsum("hgd,nhd->hgn", grouped.abs(), keys.abs()).amax(dim=-1).flatten()


def attention_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``(out [..., D], lse [...])``, both fp64. A side with lse -inf saw nothing: its out is ignored."""
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double())
    out = torch.zeros_like(out_a, dtype=torch.float64)
    for side, side_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(side_lse.double() - total)[..., None]
        out += torch.where((side_lse == -torch.inf)[..., None], 0.0, weight * side.double())
    return out, lse

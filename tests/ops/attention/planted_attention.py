"""attention_tree as a kernel would compute it, in fp32, tile by tile, p rounded, with one fault that a test must detect."""

from itertools import pairwise

import torch
from torch import Tensor

from pass_ext.reference.attention import _rows_of, attention_mask

TILE = 64
FAULTS = (
    "a bit flipped", "bits of missing nodes count", "window off by one", "window by slot, not depth", "last prefix key lost",
    "first key of a tile lost", "sums in 16 bits", "sums in fp16", "no rescale when the maximum rises", "lse in base 2",
    "hidden times zero", "softcap forgotten", "heads grouped the wrong way", "rows that see nothing get a mean",
    "rows without a request unwritten", "pages in order", "nodes from the cache",
)  # fmt: skip


def planted(fault: str = ""):
    """The op with this fault; right without one."""

    def attention_tree(
        q, k_cache, v_cache, prefix_lens, cu_nodes, visible, max_nodes, k_new, v_new, block_table, depths, scale, softcap,
        window,
    ):  # fmt: skip
        out, lse = (
            torch.zeros_like(q, memory_format=torch.contiguous_format),
            q.new_full(q.shape[:2], -torch.inf).float(),
        )
        if fault == "rows without a request unwritten":
            out, lse = out + torch.nan, lse + torch.nan
        for b, (first, last) in enumerate(pairwise(cu_nodes.tolist())):
            prefix, rows = int(prefix_lens[b]), slice(first, last)
            place = torch.arange(last - first) if fault == "window by slot, not depth" else None
            place = place if place is not None else None if depths is None else depths[rows]
            wider = window + (window >= 0 and fault == "window off by one")
            mask = attention_mask(prefix, visible[rows], place, wider)
            if first < last and fault == "a bit flipped":
                mask[-1, -1] ^= True
            if fault == "bits of missing nodes count" and 0 < last - first < max_nodes:
                mask[:, -1] |= visible[rows, (last - first) // 64] >> (last - first) % 64 & 1 == 1
            if prefix and fault == "last prefix key lost":
                mask[:, prefix - 1] = False
            if fault == "first key of a tile lost":
                mask[:, TILE::TILE] = False
            table = None if block_table is None else block_table[b]
            if table is not None and fault == "pages in order":
                table = table.sort().values.clamp(0, k_cache.shape[0] - 1)
            late = fault == "nodes from the cache" and k_new is not None
            for i in range(first, last):
                seen = mask.any(0) if fault == "hidden times zero" else mask[i - first]
                keys = seen.nonzero().flatten()
                if late:
                    keys = keys.clamp(max=k_cache.shape[1] - 1)
                k, v = (
                    _rows_of(cache, None if late else new, b, table, prefix, first, keys).float()
                    for cache, new in ((k_cache, k_new), (v_cache, v_new))
                )
                if len(keys):
                    query = q[i].float().unflatten(0, (k.shape[1], -1))
                    if fault == "heads grouped the wrong way":
                        query = q[i].float().unflatten(0, (-1, k.shape[1])).transpose(0, 1)
                    out[i], lse[i] = attend(query, k, v, mask[i - first, keys], scale, softcap, q.dtype, fault)
                elif fault == "rows that see nothing get a mean":
                    out[i] = torch.nan
        return out, lse

    return attention_tree


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sees: Tensor,
    scale: float | None,
    softcap: float,
    dtype: torch.dtype,
    fault: str,
):
    maximum, total, out = torch.full(q.shape[:2], -torch.inf), torch.zeros(q.shape[:2]), torch.zeros(q.shape)
    for k, v, s in zip(keys.split(TILE), values.split(TILE), sees.split(TILE), strict=True):
        scores = torch.einsum("hgd,nhd->hgn", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap and fault != "softcap forgotten":
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~s, -torch.inf)
        higher = torch.maximum(maximum, scores.amax(-1))
        if (higher == -torch.inf).all():
            continue
        rescale = torch.exp(maximum - higher)
        if fault == "no rescale when the maximum rises":
            rescale = torch.ones_like(rescale)
        p = torch.exp(scores - higher[..., None])
        total = total * rescale + p.sum(-1)
        out = out * rescale[..., None] + torch.einsum("hgn,nhd->hgd", p.to(dtype).float(), v)
        if fault.startswith("sums in"):
            out = out.to(torch.float16 if "fp16" in fault else dtype).float()
        maximum = higher
    if (maximum == -torch.inf).all():
        return torch.zeros(q.shape).flatten(0, 1), maximum.flatten()
    lse = torch.log2(total) + maximum / 0.6931472 if fault == "lse in base 2" else total.log() + maximum
    out = (out / total[..., None]).to(dtype)
    if fault == "heads grouped the wrong way":
        out, lse = out.transpose(0, 1), lse.t()
    return out.flatten(0, 1), lse.flatten()

"""Random problems for attention_tree: trees and arbitrary bits, caches in every layout, poison in all memory that must not be
read.

A case is a dict of the keyword arguments of attention_tree, on the CPU.
"""

import functools
import math
from itertools import accumulate

import torch
from torch import Tensor

from pass_ext.reference.attention import attention_mask

CHAIN, STAR, CATERPILLAR, BUSHY, UNIFORM = "chain", "star", "caterpillar", "bushy", "uniform"
FULL, CAUSAL, BITS = "full", "causal", "bits"
TREES = (CHAIN, STAR, CATERPILLAR, BUSHY, UNIFORM)
MASKS = (*TREES, FULL, CAUSAL, BITS)

# Layouts of dense caches and of the pages of a paged cache: [B, S, Hkv, D] contiguous, [B, Hkv, S, D] transposed, rows with
# poison between them, and such rows at unaligned addresses, which CUDA refuses.
UNALIGNED = "unaligned"
DENSE = ("rows", "heads", "gaps", UNALIGNED)
PAGED = ("paged 1", "paged 3", "paged 16", "paged 128")
LAYOUTS = (*DENSE, *PAGED)
WITHIN_PAGES = {1: "gaps", 3: "rows", 16: "heads", 128: "rows"}
UNUSED_PAGES = (2**31 - 1, -1, -(2**31), 10_000)

RANDOM, PEAKY, FLAT, SINK, ONE_HOT, ORDERED = "random", "peaky", "flat", "sink", "one-hot", "ordered"
INPUTS = (RANDOM, PEAKY, FLAT, SINK)


def parents_of(tree: str, nodes: int, random: torch.Generator) -> list[int]:
    if tree == UNIFORM:
        return [-1, *(int(torch.randint(0, i, (), generator=random)) for i in range(1, nodes))]
    parent = {
        CHAIN: lambda i: i - 1,
        STAR: lambda i: 0,
        CATERPILLAR: lambda i: i - 1 if i % 2 else i - 2,
        BUSHY: lambda i: (i - 1) // 3,
    }[tree]
    return [-1, *map(parent, range(1, nodes))]


def who_sees_whom(kind: str, nodes: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bits [nodes, nodes] and depths [nodes]: a tree's ancestors, or bits that no tree gives."""
    if kind in TREES:
        bits, depths = torch.eye(nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.int32)
        for i, parent in enumerate(parents_of(kind, nodes, random)[:nodes]):
            if parent >= 0:
                bits[i] |= bits[parent]
                depths[i] = depths[parent] + 1
        return bits, depths
    if kind == BITS:
        bits = torch.rand(nodes, nodes, generator=random) < torch.rand(nodes, 1, generator=random)
        return bits, torch.randint(0, max(nodes, 1), (nodes,), generator=random).int()
    bits = torch.ones(nodes, nodes, dtype=torch.bool)
    return bits.tril() if kind == CAUSAL else bits, torch.arange(nodes, dtype=torch.int32)


def packed(bits: Tensor, words: int, random: torch.Generator | None) -> Tensor:
    """Bits [rows, nodes] as int64 [rows, words]; bits of missing nodes are random, or 0."""
    rows, nodes = bits.shape
    wide = torch.zeros(rows, words * 64, dtype=torch.bool)
    if random is not None:
        wide = torch.rand(rows, words * 64, generator=random) < 0.5
    wide[:, :nodes] = bits
    return (wide.view(rows, words, 64).long() << torch.arange(64)).sum(dim=-1)


@functools.cache
def _poison(length: int, dtype: torch.dtype) -> Tensor:
    kinds = torch.tensor([math.nan, math.inf, -math.inf, math.nan], dtype=dtype)
    return kinds[torch.arange(length) * 2654435761 // 7 % 4]


def poison(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN and infinities: the first of a list that is made once."""
    count = math.prod(shape)
    return _poison(1 << count.bit_length(), dtype)[:count].clone().view(shape)


def poisoned_rows(layout: str, outer: int, slots: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A cache [outer, slots, heads, dim] in this layout, all poison."""
    if layout == "heads":
        return poison(outer, heads, slots, dim, dtype=dtype).transpose(1, 2)
    if layout == "rows":
        return poison(outer, slots, heads, dim, dtype=dtype)
    gap = 3 if layout == UNALIGNED else 8
    head = dim + gap
    slot = heads * head + gap
    size = slots * slot + gap
    return poison(outer * size + gap, dtype=dtype).as_strided((outer, slots, heads, dim), (size, slot, head, 1), gap)


def contents(
    inputs: str, nodes: int, keys: int, heads: tuple[int, int], dim: int, value_dim: int, random: torch.Generator
):
    """Queries [nodes, Hq, D], keys [keys, Hkv, D] and values [keys, Hkv, Dv]."""
    kv_heads, group = heads
    q = torch.randn(nodes, kv_heads * group, dim, generator=random)
    k = torch.randn(keys, kv_heads, dim, generator=random)
    v = torch.randn(keys, kv_heads, value_dim, generator=random)
    if inputs == PEAKY:
        q *= 6.0
    elif inputs == FLAT:
        q *= 0.01
    elif inputs == SINK:  # key 0 weighs as much as all others together, which are equal
        direction = torch.randn(dim, generator=random)
        direction /= direction.norm()
        q = direction * dim**0.5 + 0.1 * q
        k = torch.zeros_like(k)
        k[:1] = direction * math.log(max(keys, 2))
        v[1:] = 0.7
    elif inputs == ONE_HOT:  # out[i, head of key head h, d] = (i sees key h D + d) / number of keys that i sees
        q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        j = torch.arange(keys)
        v[j, j // dim, j % dim] = 1.0
    elif inputs == ORDERED:  # all weigh the same, and a sum in fp32 tells in which order it was added up
        q = torch.zeros_like(q)
        v = torch.tensor([2.0**25, -(2.0**25), 1.0, 3.0])[torch.randint(0, 4, v.shape, generator=random)]
    return q, k, v


def attention_case(
    prefixes: list[int],
    sizes: list[int],
    *,
    seed: int = 0,
    heads: tuple[int, int] = (2, 2),
    dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "rows",
    new: bool = False,
    mask: str = UNIFORM,
    inputs: str = RANDOM,
    window: int = -1,
    chunk: int = -1,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: bool = False,
    listed: float | None = None,
    spare: int = 0,
) -> dict[str, object]:
    """A step of requests with `sizes` nodes (0: padded) after `prefixes` tokens. heads: key heads, query heads of each. new:
    the nodes' keys and values are k_new, v_new. sinks: that of every fifth head is -inf. listed: the share of a request's keys
    that a row's list names. spare: rows without a request, and the excess of max_nodes.
    """
    random = torch.Generator().manual_seed(seed)
    kv_heads, group = heads
    bounds = [0, *accumulate(sizes)]
    rows, max_nodes = bounds[-1] + spare, max([1, *sizes]) + spare
    words = -(-max_nodes // 64)
    needed = [prefix + (0 if new else nodes) for prefix, nodes in zip(prefixes, sizes, strict=True)]

    q = poisoned_rows("gaps", 1, rows, kv_heads * group, dim, dtype)[0]
    widths = dim, value_dim or dim
    k_new, v_new = (
        poisoned_rows(kind, 1, rows, kv_heads, width, dtype)[0]
        for kind, width in zip(("gaps", "rows"), widths, strict=True)
    )
    visible = packed(torch.ones(rows, 0, dtype=torch.bool), words, random)
    depths = torch.full((rows,), 2**31 - 1, dtype=torch.int32)
    table, page = None, 0
    lists: list[Tensor] = []
    if layout in DENSE:
        k_cache, v_cache = (
            poisoned_rows(kind, len(sizes), max([0, *needed]) + spare, kv_heads, width, dtype)
            for kind, width in zip((layout, "heads" if layout == "gaps" else layout), widths, strict=True)
        )
    else:
        page = int(layout.split()[1])
        table, pages = block_table(needed, page, torch.Generator().manual_seed(seed))
        k_cache, v_cache = (poisoned_rows(WITHIN_PAGES[page], pages, page, kv_heads, width, dtype) for width in widths)

    for b, (prefix, nodes) in enumerate(zip(prefixes, sizes, strict=True)):
        if nodes == 0:
            continue  # all its memory stays poison
        request_rows = slice(bounds[b], bounds[b + 1])
        bits, depths[request_rows] = who_sees_whom(mask, nodes, random)
        visible[request_rows] = packed(bits, words, random)
        queries, k, v = contents(inputs, nodes, prefix + nodes, heads, *widths, random)
        q[request_rows] = queries.to(dtype)
        seen = attention_mask(prefix, visible[request_rows], depths[request_rows], window, chunk)
        if listed is not None:
            named = torch.rand(seen.shape, generator=random) < listed
            lists += [row.nonzero().flatten() for row in named]
            seen = seen & named
        keys = seen.any(dim=0).nonzero().flatten()
        nodes_seen, in_cache = keys[keys >= prefix], keys[keys < prefix] if new else keys
        slots = (b, in_cache) if table is None else (table[b, in_cache // page].long(), in_cache % page)
        for cache, fresh, values in ((k_cache, k_new, k.to(dtype)), (v_cache, v_new, v.to(dtype))):
            cache[slots] = values[in_cache]
            fresh[bounds[b] + nodes_seen - prefix] = values[nodes_seen]
    return dict(
        q=q, k_cache=k_cache, v_cache=v_cache, prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        cu_nodes=torch.tensor(bounds, dtype=torch.int32), visible=visible, max_nodes=max_nodes,
        k_new=k_new if new else None, v_new=v_new if new else None, block_table=table,
        depths=depths if max(window, chunk) >= 0 else None, scale=scale, softcap=softcap, window=window, chunk=chunk,
        sinks=random_sinks(kv_heads * group, max([1, *prefixes]), seed) if sinks else None,
        key_lists=None if listed is None else padded_lists(lists, rows),
    )  # fmt: skip


def padded_lists(lists: list[Tensor], rows: int) -> Tensor:
    """Lists of keys with -1 after the last; those of further rows name anything. Rows have a gap between them."""
    width = max(map(len, lists), default=0) + 1
    padded = torch.tensor(UNUSED_PAGES, dtype=torch.int32).repeat(rows, width // 4 + 1)
    for i, keys in enumerate(lists):
        padded[i, : len(keys)], padded[i, len(keys) :] = keys, -1
    return padded[:, :width]


def random_sinks(heads: int, keys: int, seed: int) -> Tensor:
    """Logits of sinks that weigh about as much as so many keys."""
    sinks = math.log(keys) + 2 * torch.randn(heads, generator=torch.Generator().manual_seed(seed))
    sinks[4::5] = -math.inf
    return sinks


def block_table(needed: list[int], page: int, random: torch.Generator) -> tuple[Tensor, int]:
    """Shuffled pages from a pool with some to spare; entries after the last used one name no page."""
    counts = [-(-slots // page) for slots in needed]
    pages = sum(counts) + 3
    free = torch.randperm(pages, generator=random).int()
    wide = torch.tensor(UNUSED_PAGES, dtype=torch.int32).repeat(len(needed), max([0, *counts]) // 4 + 2)
    table = wide[:, : max([0, *counts]) + 2]
    for b, (first, count) in enumerate(zip([0, *accumulate(counts)][:-1], counts, strict=True)):
        table[b, :count] = free[first : first + count]
    return table, pages

"""Inputs of attention: queries and cache of one layer, random trees in every form that a contender takes; and the reference.

    excess = max |result - reference| / (4 roundoff (|reference| + sum of p |v|))

A result is right where its excess is at most 1.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.contenders.inputs.distributions import require
from pass_ext.layers import dequantize_rows, quantize_rows
from pass_ext.ops.quantize import CODE_HEADER

PAGE = 64  # slots of a page; every cache is rounded up to whole pages
# Unit roundoff of the bound. Float32 gets a larger one, because contenders may approximate exponentials.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}


@dataclass(frozen=True)
class Spec:
    """One line of the table: `batch` requests, each with a prefix and a tree of that many nodes."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    prefix: int
    nodes: int
    window: int = -1
    """Positions that a node sees, itself and those before it; -1: all."""
    width_of_values: int | None = None
    """Another head size of values than that of keys."""
    is_latent: bool = False
    """Values are the first numbers of the keys."""
    has_sinks: bool = False
    codes: torch.dtype | None = None
    """Keys and values are in 8 bits for ours, and the same numbers in the type of the queries for others."""
    listed: int = 0
    """Random keys of the prefix that a node's list names, beside its path; 0: no lists."""

    @property
    def value_dim(self) -> int:
        """The head size of values."""
        return self.width_of_values or self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def keys(self) -> int:
        """Keys of one request: its prefix, then its nodes."""
        return self.prefix + self.nodes

    @property
    def prefix_read(self) -> int:
        """Keys of the prefix that some node sees; with lists at most."""
        if self.listed:
            return min(self.prefix, self.nodes * self.listed)
        return self.prefix if self.window < 0 else min(self.prefix, self.window - 1)

    @property
    def slots(self) -> int:
        """Slots of one request in the cache."""
        return -(-self.keys // PAGE) * PAGE

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values that one call reads."""
        widths = (self.head_dim,) if self.is_latent else (self.head_dim, self.value_dim)
        row = sum(CODE_HEADER + width if self.codes else width * dtype.itemsize for width in widths)
        return self.batch * (self.prefix_read + self.nodes) * self.kv_heads * row

    def rows_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the queries, the results and their lse."""
        return self.batch * self.nodes * self.heads * ((self.head_dim + self.value_dim) * dtype.itemsize + 4)

    def flops(self, seen: int | None = None) -> int:
        """Flops of both products over the visible keys. `seen`: pairs of nodes that see each other; default: all pairs."""
        rows = self.batch * self.nodes
        pairs = rows * (self.listed or self.prefix_read) + (rows * self.nodes if seen is None else seen)
        return 2 * pairs * self.heads * (self.head_dim + self.value_dim)


@dataclass
class Trees:
    """The trees of a step, the same for all layers: which node sees which. N = B n nodes, packed."""

    spec: Spec
    prefix_lens: Tensor  # [B]
    no_prefix: Tensor  # [B], zeros
    cu_nodes: Tensor  # [B + 1]
    visible: Tensor  # [N, 1]
    depths: Tensor  # [N]
    seen: Tensor  # [B, n, n] bool
    mask: Tensor  # [B, 1, n, keys], 0 or -inf in the type of the queries
    folded_mask: Tensor  # [B, 1, n G, keys]
    lists: Tensor | None = None  # [N, listed + n]
    prepared: dict[str, Any] = field(default_factory=dict)  # contender -> its plan or compiled kernel


@dataclass
class Step:
    """One layer of one step."""

    trees: Trees
    q: Tensor  # [N, Hq, D], packed
    k: Tensor  # [B, Hkv, slots, D]; the nodes are after the prefix
    v: Tensor
    sinks: Tensor | None = None  # [Hq]
    stored: tuple[Tensor, Tensor] | None = None  # k and v in 8 bits
    pages: tuple[Tensor, Tensor] | None = None  # a copy [B slots / PAGE, PAGE, Hkv, D], for libraries

    @property
    def spec(self) -> Spec:
        """The line of this step."""
        return self.trees.spec


def make_parents(nodes: int, generator: random.Random) -> list[int]:
    """The parents of a random tree: any earlier node, -1 for node 0."""
    return [-1, *(generator.randrange(node) for node in range(1, nodes))]


def make_trees(spec: Spec, dtype: torch.dtype, device: str, seed: int = 0) -> Trees:
    """A random tree per request; a node sees its ancestors and itself."""
    generator = random.Random(seed)
    words: list[int] = []
    depths: list[int] = []
    for _ in range(spec.batch):
        of_request: list[int] = []
        for node, parent in enumerate(make_parents(spec.nodes, generator)):
            of_request.append((of_request[parent] if node else 0) | 1 << node)
        words += of_request
        depths += [word.bit_count() - 1 for word in of_request]
    visible = torch.tensor([word - (word >> 63 << 64) for word in words])[:, None]  # as a signed word
    seen = (visible >> torch.arange(spec.nodes) & 1).bool().view(spec.batch, spec.nodes, spec.nodes).to(device)
    # Rows of the mask are aligned for vector loads: some kernels copy masks that are not.
    mask = torch.zeros(spec.batch, 1, spec.nodes, spec.slots, dtype=dtype, device=device)
    mask[:, 0, :, spec.prefix : spec.keys].masked_fill_(~seen, float("-inf"))
    placed = torch.tensor(depths, device=device).view(spec.batch, 1, spec.nodes, 1)
    if spec.window >= 0:
        require(
            spec.nodes <= spec.window,
            "window must be at least the nodes: else a node does not see all its ancestors and `seen` is wrong",
        )
        before = torch.arange(spec.prefix, device=device) <= spec.prefix + placed - spec.window
        mask[..., : spec.prefix].masked_fill_(before, float("-inf"))
    integers = {"dtype": torch.int32, "device": device}
    lists = None
    if spec.listed:
        chances = torch.rand(spec.batch, spec.nodes, spec.prefix, generator=torch.Generator().manual_seed(seed))
        chosen = (
            torch.zeros(chances.shape, dtype=torch.bool).scatter_(2, chances.topk(spec.listed).indices, True).to(device)
        )
        mask[:, 0, :, : spec.prefix].masked_fill_(~chosen, float("-inf"))
        rows, keys = torch.cat((chosen, seen), 2).flatten(0, 1).nonzero(as_tuple=True)
        lists = torch.full((len(words), spec.listed + spec.nodes), -1, **integers)
        places = torch.arange(len(rows), device=device) - torch.searchsorted(rows, rows)
        lists[rows, places] = keys.int()
    return Trees(
        spec,
        torch.full((spec.batch,), spec.prefix, **integers),
        torch.zeros(spec.batch, **integers),
        torch.arange(spec.batch + 1, **integers) * spec.nodes,
        visible.to(device),
        placed.flatten().int(),
        seen,
        mask[..., : spec.keys],
        mask.repeat_interleave(spec.group, dim=2)[..., : spec.keys],
        lists,
    )


def make_step(trees: Trees, dtype: torch.dtype, device: str, generator: torch.Generator) -> Step:
    """A layer of random numbers. A visible node weighs about a quarter of the visible prefix, so a wrong bit shows."""
    spec = trees.spec

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    q = draw(spec.batch * spec.nodes, spec.heads, spec.head_dim)
    k, v = (draw(spec.batch, spec.kv_heads, spec.slots, width) for width in (spec.head_dim, spec.value_dim))
    q[..., 0] = 4
    k[:, :, spec.prefix :, 0] = (
        torch.tensor((spec.listed or spec.prefix_read) / 4).log().item() * spec.head_dim**0.5 / 4
    )
    stored = None
    if spec.codes is not None:
        stored = quantize_rows(k, spec.codes), quantize_rows(v, spec.codes)
        k, v = (dequantize_rows(rows, dtype) for rows in stored)
    if spec.is_latent:
        v = k[..., : spec.value_dim]
    sinks = draw(spec.heads) + torch.tensor(spec.prefix_read).log().item() if spec.has_sinks else None
    return Step(trees, q, k, v, sinks, stored)


def as_heads(step: Step) -> Tensor:
    """The queries in PyTorch's layout: a view [B, Hq, n, D]."""
    spec = step.spec
    return step.q.view(spec.batch, spec.nodes, spec.heads, spec.head_dim).transpose(1, 2)


def fold(step: Step) -> Tensor:
    """The queries of each key head as its rows: a copy [B, Hkv, n G, D]."""
    spec = step.spec
    split = step.q.view(spec.batch, spec.nodes, spec.kv_heads, spec.group, spec.head_dim)
    return split.transpose(1, 2).reshape(spec.batch, spec.kv_heads, spec.nodes * spec.group, spec.head_dim)


def unfold(step: Step, folded: Tensor) -> Tensor:
    """The inverse of `fold`: [B, Hkv, n G, …] to [N, Hq, …]."""
    spec = step.spec
    split = folded.unflatten(2, (spec.nodes, spec.group)).transpose(1, 2)
    return split.reshape(spec.batch * spec.nodes, spec.heads, *folded.shape[3:])


def as_rows(step: Step, result: Any) -> Tensor:
    """A contender's result as [N, Hq, D]."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    if out.dim() == 3:
        return out
    return unfold(step, out) if out.shape[1] == step.spec.kv_heads else out.transpose(1, 2).flatten(0, 1)


def reference(step: Step) -> tuple[Tensor, Tensor]:
    """The sums of p v and of p |v| in float64, request by request, both [N, Hq, D]."""
    spec, outs, magnitudes = step.spec, [], []
    for b in range(spec.batch):
        q = fold(step)[b].double()  # [Hkv, n G, D]
        k, v = (cache[b, :, : spec.keys].double() for cache in (step.k, step.v))
        scores = q @ k.mT * spec.head_dim**-0.5
        scores.masked_fill_(step.trees.folded_mask[b] < 0, float("-inf"))
        lse = scores.logsumexp(-1, keepdim=True)
        if step.sinks is not None:  # of the query heads of each row
            lse = lse.logaddexp(step.sinks.double().view(spec.kv_heads, spec.group).repeat(1, spec.nodes)[..., None])
        p = (scores - lse).exp()
        outs.append(p @ v)
        magnitudes.append(p @ v.abs())
    return unfold(step, torch.stack(outs)), unfold(step, torch.stack(magnitudes))


def excess(step: Step, result: Any, expected: tuple[Tensor, Tensor]) -> float:
    """The largest error over the bound for a few roundings of p and the result; infinite for a result that is not finite."""
    out, magnitude = expected
    bound = 4 * ROUNDOFF[step.q.dtype] * (out.abs() + magnitude)
    return ((as_rows(step, result).double() - out).abs() / bound).nan_to_num(float("inf")).max().item()

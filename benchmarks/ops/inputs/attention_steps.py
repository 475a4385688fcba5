"""What the contenders of attention.py get: one layer's queries and cache of a step, its random trees in every form that
somebody needs, the reference in float64 and how far from it a result may be.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.inputs.distributions import require

PAGE = 64  # slots of a page, for libraries that want pages; also what every cache is rounded up to
# Unit roundoff that a result is judged with. Float32: not its own, since peers may take exponentials by approximation.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}


@dataclass(frozen=True)
class Spec:
    """One line of the table: batch requests with a prefix of that length and a tree of that many nodes each."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    prefix: int
    nodes: int
    window: int = -1
    """Positions that a node sees back in the text, itself included; -1: all."""

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def keys(self) -> int:
        """Of one request: its prefix, then its nodes."""
        return self.prefix + self.nodes

    @property
    def prefix_read(self) -> int:
        """Keys of the prefix that some node sees."""
        return self.prefix if self.window < 0 else min(self.prefix, self.window - 1)

    @property
    def slots(self) -> int:
        """Of one request in the cache."""
        return -(-self.keys // PAGE) * PAGE

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Of the keys and values that one call reads."""
        return 2 * self.batch * (self.prefix_read + self.nodes) * self.kv_heads * self.head_dim * dtype.itemsize

    def rows_bytes(self, dtype: torch.dtype) -> int:
        """Of the queries, the results and their lse."""
        return self.batch * self.nodes * self.heads * (2 * self.head_dim * dtype.itemsize + 4)

    def flops(self, seen: int | None = None) -> int:
        """Of both products, over the keys that rows see; `seen`: nodes seen by nodes, all requests. Default: all by all."""
        rows = self.batch * self.nodes
        pairs = rows * self.prefix_read + (rows * self.nodes if seen is None else seen)
        return 4 * pairs * self.heads * self.head_dim


@dataclass
class Trees:
    """What all layers of a step share: who sees whom. N = B n nodes, packed."""

    spec: Spec
    prefix_lens: Tensor  # [B]
    no_prefix: Tensor  # [B], zeros
    cu_nodes: Tensor  # [B + 1]
    visible: Tensor  # [N, 1]
    depths: Tensor  # [N]
    seen: Tensor  # [B, n, n] bool
    mask: Tensor  # [B, 1, n, keys], 0 or -inf in the type of the queries
    folded_mask: Tensor  # [B, 1, n G, keys]
    prepared: dict[str, Any] = field(default_factory=dict)  # by contenders that plan or compile


@dataclass
class Step:
    """One layer of one step."""

    trees: Trees
    q: Tensor  # [N, Hq, D], packed
    k: Tensor  # [B, Hkv, slots, D]; the nodes are behind the prefix
    v: Tensor
    pages: tuple[Tensor, Tensor] | None = None  # a copy [B slots / PAGE, PAGE, Hkv, D], where somebody wants one

    @property
    def spec(self) -> Spec:
        """The line."""
        return self.trees.spec


def make_parents(nodes: int, generator: random.Random) -> list[int]:
    """A random tree: every node's parent is any node before it, node 0 is the root."""
    return [-1, *(generator.randrange(node) for node in range(1, nodes))]


def make_trees(spec: Spec, dtype: torch.dtype, device: str, seed: int = 0) -> Trees:
    """A tree per request; a node sees its ancestors and itself."""
    generator = random.Random(seed)
    words: list[int] = []
    depths: list[int] = []
    for _ in range(spec.batch):
        own: list[int] = []
        for node, parent in enumerate(make_parents(spec.nodes, generator)):
            own.append((own[parent] if node else 0) | 1 << node)
        words += own
        depths += [word.bit_count() - 1 for word in own]
    visible = torch.tensor([word - (word >> 63 << 64) for word in words])[:, None]  # as a signed word
    seen = (visible >> torch.arange(spec.nodes) & 1).bool().view(spec.batch, spec.nodes, spec.nodes).to(device)
    # Rows of the mask start where vector loads may: some kernels copy masks that do not.
    mask = torch.zeros(spec.batch, 1, spec.nodes, spec.slots, dtype=dtype, device=device)
    mask[:, 0, :, spec.prefix : spec.keys].masked_fill_(~seen, float("-inf"))
    placed = torch.tensor(depths, device=device).view(spec.batch, 1, spec.nodes, 1)
    if spec.window >= 0:
        require(spec.nodes <= spec.window, "a node must see its ancestors, else `seen` is wrong")
        before = torch.arange(spec.prefix, device=device) <= spec.prefix + placed - spec.window
        mask[..., : spec.prefix].masked_fill_(before, float("-inf"))
    integers = {"dtype": torch.int32, "device": device}
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
    )


def make_step(trees: Trees, dtype: torch.dtype, device: str, generator: torch.Generator) -> Step:
    """Random numbers, but a node seen weighs about as much as a quarter of the prefix that it sees: a wrong bit shows."""
    spec = trees.spec

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    q = draw(spec.batch * spec.nodes, spec.heads, spec.head_dim)
    k, v = (draw(spec.batch, spec.kv_heads, spec.slots, spec.head_dim) for _ in range(2))
    q[..., 0] = 4
    k[:, :, spec.prefix :, 0] = torch.tensor(spec.prefix_read / 4).log().item() * spec.head_dim**0.5 / 4
    return Step(trees, q, k, v)


def as_heads(step: Step) -> Tensor:
    """The queries as PyTorch wants them: a view [B, Hq, n, D]."""
    spec = step.spec
    return step.q.view(spec.batch, spec.nodes, spec.heads, spec.head_dim).transpose(1, 2)


def fold(step: Step) -> Tensor:
    """The queries with those that share a key head as its rows: a copy [B, Hkv, n G, D]."""
    spec = step.spec
    split = step.q.view(spec.batch, spec.nodes, spec.kv_heads, spec.group, spec.head_dim)
    return split.transpose(1, 2).reshape(spec.batch, spec.kv_heads, spec.nodes * spec.group, spec.head_dim)


def unfold(step: Step, folded: Tensor) -> Tensor:
    """The other way: [B, Hkv, n G, …] to [N, Hq, …]."""
    spec = step.spec
    split = folded.unflatten(2, (spec.nodes, spec.group)).transpose(1, 2)
    return split.reshape(spec.batch * spec.nodes, spec.heads, *folded.shape[3:])


def as_rows(step: Step, result: Any) -> Tensor:
    """Whatever a contender returns, as [N, Hq, D]."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    if out.dim() == 3:
        return out
    return unfold(step, out) if out.shape[1] == step.spec.kv_heads else out.transpose(1, 2).flatten(0, 1)


def reference(step: Step) -> tuple[Tensor, Tensor]:
    """In float64, request by request: the sum of p v, and that of p |v|, both [N, Hq, D]."""
    spec, outs, magnitudes = step.spec, [], []
    for b in range(spec.batch):
        q = fold(step)[b].double()  # [Hkv, n G, D]
        k, v = (cache[b, :, : spec.keys].double() for cache in (step.k, step.v))
        scores = q @ k.mT * spec.head_dim**-0.5
        scores.masked_fill_(step.trees.folded_mask[b] < 0, float("-inf"))
        p = scores.softmax(-1)
        outs.append(p @ v)
        magnitudes.append(p @ v.abs())
    return unfold(step, torch.stack(outs)), unfold(step, torch.stack(magnitudes))


def excess(step: Step, result: Any, expected: tuple[Tensor, Tensor]) -> float:
    """The largest error over what rounding explains, p and the result each rounded a few times; above 1, the result is
    wrong. Not finite: infinite."""
    out, magnitude = expected
    bound = 4 * ROUNDOFF[step.q.dtype] * (out.abs() + magnitude)
    return ((as_rows(step, result).double() - out).abs() / bound).nan_to_num(float("inf")).max().item()

"""What only the CUDA kernels of attention have: shares of a grid, parts and their merging, pages by asynchronous copies.

Against fp64 softmax attention with a boolean mask, written here from the definition. On the emulator, so small.
"""

import itertools

import pytest
import torch
from emulated.attention import attention_merge, attention_tree

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
NONE = float("-inf")


class Case:
    """A ragged batch in pages or dense, with everything that no row may see full of NaN."""

    def __init__(
        self, prefixes, nodes, dim=64, heads=1, kv_heads=1, dtype=torch.bfloat16, page=0, separate=False, window=-1,
        softcap=0.0, max_nodes=None, seed=0, behind=0, scale=None,
    ):  # fmt: skip
        random = torch.Generator().manual_seed(seed)
        self.prefixes, self.nodes, self.window, self.softcap, self.scale = prefixes, nodes, window, softcap, scale
        self.max_nodes = max_nodes or max([*nodes, 1])
        self.group = heads // kv_heads
        self.bounds = [0, *itertools.accumulate(nodes)]
        rows, requests = self.bounds[-1] + behind, len(nodes)
        self.q = torch.randn(rows, heads, dim, generator=random).to(dtype)
        longest = max([p + (0 if separate else n) for p, n in zip(prefixes, nodes, strict=True)] + [1])
        slots = longest + 3
        width = max(page, 1)
        pages = -(-slots // page) if page else 1
        shape = (requests * pages + 2, page, kv_heads, dim) if page else (requests, slots, kv_heads, dim)
        self.k_cache, self.v_cache = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
        self.block_table = None
        if page:
            self.block_table = torch.randperm(shape[0], generator=random)[: requests * pages].view(requests, pages).int()
        self.keys, self.values = [], []
        self.k_new, self.v_new = (
            [torch.full((rows, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)] if separate else (None, None)
        )
        for b, (prefix, count) in enumerate(zip(prefixes, nodes, strict=True)):
            k, v = (torch.randn(prefix + count, kv_heads, dim, generator=random).to(dtype) for _ in range(2))
            for whole, cache, new in ((k, self.k_cache, self.k_new), (v, self.v_cache, self.v_new)):
                stored = prefix if separate else prefix + count
                for i in range(stored):
                    place = (int(self.block_table[b, i // width]), i % width) if page else (b, i)
                    cache[place] = whole[i]
                if separate:
                    new[self.bounds[b] : self.bounds[b + 1]] = whole[prefix:]
            self.keys.append(k)
            self.values.append(v)
        words = -(-self.max_nodes // 64)
        self.visible = torch.randint(-(2**63), 2**63 - 1, (rows, words), generator=random)
        for b, count in enumerate(nodes):  # each sees itself
            for i in range(count):
                self.visible[self.bounds[b] + i, i // 64] |= torch.tensor(1).bitwise_left_shift(i % 64)
        self.depths = torch.zeros(rows, dtype=torch.int32)
        for b, count in enumerate(nodes):
            for i in range(1, count):
                self.depths[self.bounds[b] + i] = int(self.depths[self.bounds[b] + (i * 7) % i]) + 1 if i > 1 else 1

    def mask(self, b):
        """[nodes, keys] of one request: who sees whom."""
        prefix, count, first = self.prefixes[b], self.nodes[b], self.bounds[b]
        mask = torch.zeros(count, prefix + count, dtype=torch.bool)
        for i in range(count):
            depth = int(self.depths[first + i])
            for j in range(prefix + count):
                node = j - prefix
                seen = node < 0 or bool(int(self.visible[first + i, node // 64]) >> (node % 64) & 1)
                position = j if node < 0 else prefix + int(self.depths[first + node])
                mask[i, j] = seen and (self.window < 0 or prefix + depth - self.window < position)
        return mask

    def exact(self):
        """out, lse and A, the attention over |V|, in fp64."""
        rows, heads, dim = self.q.shape
        out, magnitude = (torch.zeros(rows, heads, dim, dtype=torch.float64) for _ in range(2))
        lse = torch.full((rows, heads), NONE, dtype=torch.float64)
        for b, count in enumerate(self.nodes):
            span, mask = slice(self.bounds[b], self.bounds[b] + count), self.mask(b)
            for h in range(heads):
                k, v = (t[b][:, h // self.group].double() for t in (self.keys, self.values))
                scores = self.q[span, h].double() @ k.T * (dim**-0.5 if self.scale is None else self.scale)
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                scores = scores.masked_fill(~mask, NONE)
                weights = torch.nan_to_num(scores.softmax(-1), nan=0.0)
                out[span, h], magnitude[span, h] = weights @ v, weights @ v.abs()
                lse[span, h] = scores.logsumexp(-1)
        return out, lse, magnitude

    def run(self, **launch):
        return attention_tree(
            self.q, self.k_cache, self.v_cache, torch.tensor(self.prefixes, dtype=torch.int32),
            torch.tensor(self.bounds, dtype=torch.int32), self.visible, self.max_nodes, self.k_new, self.v_new,
            self.block_table, self.depths, self.scale, self.softcap, self.window, **launch,
        )  # fmt: skip

    def check(self, out, lse):
        exact, exact_lse, magnitude = self.exact()
        unit = ROUNDING[self.q.dtype]
        bound = unit * exact.abs() + unit * (magnitude + exact.abs()) + 2e-5 * magnitude
        excess = (out.double() - exact).abs() - bound
        assert not out.isnan().any()
        assert (excess <= 0).all(), f"{int((excess > 0).sum())} beyond the bound, by up to {excess.max():.2e}"
        nothing = exact_lse == NONE
        assert torch.equal(lse == NONE, nothing)
        assert ((lse - exact_lse)[~nothing].abs() <= 2e-5 + 2**-20 * exact_lse[~nothing].abs()).all()


def test_one_request_in_one_block():
    case = Case([70], [3])
    case.check(*case.run(blocks=1))

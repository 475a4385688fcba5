"""Errors of attention_tree and linear_rows, each against float64.

    ratio = largest error of ours / largest error of PyTorch in the same type, for the same inputs
    NMSE  = sum (ours - exact)^2 / sum exact^2

PyTorch's attention is scaled_dot_product_attention with the same mask, its product torch.nn.functional.linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import pass_ext

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def measure() -> dict[str, Any]:
    """For each op and type: the number of problems, the worst ratio with its problem, the worst NMSE of both."""
    rows = []
    makers: dict[str, Callable[[torch.dtype], Iterator[_Problem]]] = {
        "attention_tree": _attention,
        "linear_rows": _products,
    }
    for (op, maker), dtype in product(makers.items(), DTYPES):
        row: dict[str, Any] = {"op": op, "dtype": str(dtype).removeprefix("torch."), "problems": 0}
        row |= {"ratio": 0.0, "at": "", "nmse": 0.0, "plain nmse": 0.0}
        for name, ours, plain, exact in maker(dtype):
            row["problems"] += 1
            ratio = _largest(ours, exact) / max(_largest(plain, exact), torch.finfo(dtype).tiny)
            if ratio > row["ratio"]:
                row |= {"ratio": round(ratio, 3), "at": name}
            row["nmse"] = max(row["nmse"], _nmse(ours, exact))
            row["plain nmse"] = max(row["plain nmse"], _nmse(plain, exact))
        rows.append(row)
    return {"torch": torch.__version__, "isa": pass_ext.status().cpu_isa, "rows": rows}


_Problem = tuple[str, Tensor, Tensor, Tensor]


def _attention(dtype: torch.dtype) -> Iterator[_Problem]:
    """Chains of nodes after a prefix: so PyTorch's mask is the last rows of a causal one."""
    shapes = product((1, 63, 500, 4096), (1, 5, 16, 64), (64, 128, 256), (1.0, 4.0))
    for number, (prefix, nodes, dim, spread) in enumerate(shapes):
        random = torch.Generator().manual_seed(number)
        heads, group, keys = 2, 4, prefix + nodes
        q, k, v = (
            torch.randn(rows, count, dim, generator=random).mul_(size).to(dtype)
            for rows, count, size in ((nodes, heads * group, spread), (keys, heads, 1.0), (keys, heads, 1.0))
        )
        bits = torch.ones(nodes, nodes, dtype=torch.bool).tril()
        visible = (bits.long() << torch.arange(nodes)).sum(1, keepdim=True)
        ours, _ = pass_ext.attention_tree(
            q, k[None], v[None], torch.tensor([prefix]), torch.tensor([0, nodes]), visible, nodes
        )
        mask = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), bits], 1)

        def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = mask, group: int = group) -> Tensor:
            k, v = (t.repeat_interleave(group, 1).transpose(0, 1)[None] for t in (k, v))
            return functional.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, mask)[0].transpose(0, 1)

        name = f"{prefix} keys, {nodes} rows, D {dim}, q × {spread:g}"
        yield name, ours, sdpa(q, k, v), sdpa(q.double(), k.double(), v.double())


def _products(dtype: torch.dtype) -> Iterator[_Problem]:
    for number, (rows, width, outputs) in enumerate(product((1, 8, 64), (64, 576, 4096, 12288), (48, 576, 1536))):
        random = torch.Generator().manual_seed(number)
        x, weight = (torch.randn(n, width, generator=random).to(dtype) for n in (rows, outputs))
        plain, exact = functional.linear(x, weight), functional.linear(x.double(), weight.double())
        yield f"{rows} rows, {width} to {outputs}", pass_ext.layers.linear_rows(x, weight), plain, exact


def _largest(result: Tensor, exact: Tensor) -> float:
    return (result.double() - exact).abs().max().item()


def _nmse(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).square().sum() / exact.square().sum()).item()

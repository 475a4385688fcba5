"""``linear_rows`` in plain PyTorch: one matrix product in fp32 (fp64 for float64), rounded once."""

import torch
from torch import Tensor


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """out[..., o] = sum over i of x[..., i] weight[o, i], plus bias[o]; in x's dtype."""
    exact = torch.promote_types(x.dtype, torch.float32)
    out = x.to(exact) @ weight.to(exact).T
    return (out if bias is None else out + bias.to(exact)).to(x.dtype)

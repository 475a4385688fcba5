"""``linear_rows`` in plain PyTorch: one matrix product in fp32 (fp64 for float64), rounded once. ``linear_packed``: the exact
product of a packed weight's own numbers, in fp64."""

import torch
from torch import Tensor


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """out[..., o] = sum over i of x[..., i] weight[o, i], plus bias[o]; in x's dtype."""
    exact = torch.promote_types(x.dtype, torch.float32)
    out = x.to(exact) @ weight.to(exact).T
    return (out if bias is None else out + bias.to(exact)).to(x.dtype)


_FORMS = {
    296: (4, torch.float16, 0, 1),
    320: (4, torch.float16, 0, 0),
    328: (4, torch.float16, 0, 2),
    336: (4, torch.float16, 16, 0),
    384: (4, torch.float32, 0, 0),
    400: (4, torch.float32, 16, 0),
    552: (8, torch.float16, 0, 1),
    576: (8, torch.float16, 0, 0),
    584: (8, torch.float16, 0, 2),
    640: (8, torch.float32, 0, 0),
}
"""Bytes of a block of 32 inputs and 16 outputs -> bits of a code; dtype of scales and offsets; bytes of a table of what codes
stand for; and how many factors a scale has, which eight blocks then share."""


def linear_packed(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, outputs: int) -> Tensor:
    """out[..., o] = sum over i of x[..., i] weight[o, i], plus bias[o]; in x's dtype."""
    out = x.double() @ unpacked(weight, torch.float64)[:outputs].T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def unpacked(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers ``[out, in]`` of a packed weight: scale code[o, i] + offset, or table[code]; with factors of scale and
    offset. Computed in this dtype; outputs are whole groups."""
    groups, blocks, size = weight.shape
    bits, scales, entries, factors = _FORMS[size]
    steps, parts, head = 8 if factors else 1, max(factors, 1), 2 * 16 * scales.itemsize
    runs = weight.reshape(groups, blocks // steps, steps * size)
    numbers = runs[..., :head].view(scales).view(groups, -1, 1, 1, 2, 16).to(dtype)
    if factors:
        whole = runs[..., head : head + steps * factors * 32].view(torch.int8)
        numbers = numbers * whole.view(groups, -1, steps, 2, parts, 16).transpose(3, 4)
    numbers = numbers.reshape(groups, blocks, parts, 2, 16)
    stored = runs[..., head + steps * factors * 32 + entries :].reshape(groups, blocks, bits, 16, 4)
    words = stored.long() << torch.arange(0, 32, 8, device=weight.device)
    words = words.sum(-1)  # [groups, blocks, words, 16]
    shifts = [bits * (i // 2) + 16 * (i % 2) for i in range(32 // bits)]  # of each code: even ones in the lower half
    codes = torch.stack([words >> shift & ((1 << bits) - 1) for shift in shifts], dim=3).view(
        groups, blocks, parts, -1, 16
    )
    if entries:
        table = weight[..., head : head + entries].long()
        codes = table.gather(-1, codes.flatten(2)).view(codes.shape)
    dense = codes * numbers[:, :, :, None, 0] + numbers[:, :, :, None, 1]  # [groups, blocks, parts, inputs, 16]
    return dense.permute(0, 4, 1, 2, 3).reshape(groups * 16, blocks * 32)

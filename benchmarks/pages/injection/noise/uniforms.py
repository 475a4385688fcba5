"""Uniform numbers that draw the tokens of a text by the inverse of the model's distribution function, tokens in the order of
their ids, and what a slot reads of such a number.

    F(v)        sum of p over ids up to v;  F(-1) = 0
    drawing     x = the least v with F(v) > u
    posterior   u = F(x - 1) + U p(x), U uniform in [0, 1): uniform in [0, 1) if x has the law p, and quantile(u) = x
    features    2 u - 1;  sin and cos of 2 pi f u, f = 1, 2, 3, 4, 6, 8, 12, ... 4096;  the binary digits of u as -1 and 1
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DIGITS = 12
FREQUENCIES = sorted({2**k for k in range(DIGITS + 1)} | {3 * 2**k for k in range(DIGITS - 1)})
FEATURES = 1 + 2 * len(FREQUENCIES) + DIGITS


def distribution_function(logits: Tensor, temperature: float) -> Tensor:
    """F, fp64 ``[N, V]``, of softmax(logits / temperature)."""
    sums = (logits.double() / temperature).softmax(-1).cumsum(-1)
    return sums / sums[:, -1:]


def quantile(sums: Tensor, u: Tensor) -> Tensor:
    """The token ``[N]`` that u draws from F [N, V]."""
    return torch.searchsorted(sums, u[:, None], right=True)[:, 0]


def posterior_uniforms(sums: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """u ``[N]`` given the ``tokens`` [N] that they drew from F [N, V]."""
    above = sums.gather(1, tokens[:, None])[:, 0]
    below = sums.gather(1, (tokens - 1).clamp_min(0)[:, None])[:, 0].where(tokens > 0, 0.0)
    share = torch.rand(len(tokens), dtype=torch.float64, generator=generator).to(sums.device)
    return below + share * (above - below)


def features(u: Tensor) -> Tensor:
    """fp32 ``[..., FEATURES]`` of u [...]."""
    u = u.double()[..., None]
    angles = 2 * math.pi * u * torch.tensor(FREQUENCIES, dtype=torch.float64, device=u.device)
    bits = (u * 2.0 ** torch.arange(1, DIGITS + 1, device=u.device)).floor() % 2
    return torch.cat([2 * u - 1, angles.sin(), angles.cos(), 2 * bits - 1], -1).float()
